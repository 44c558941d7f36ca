"""Compile the kernels for GPUs that are not there, and report what came out.

``python -m kvlab_kernels.aot [90 ...]`` prints the table. It must run without ``TRITON_INTERPRET``. The arguments are meta tensors that go
through the same host code as a real call, so what is compiled is what would be launched.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import decode, launch, quantize, scored
from .layout import Codes, Places
from .reference import destination

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip

Pair = tuple[Tensor | Codes, Tensor | Codes]


@dataclass(frozen=True)
class Row:
    """What the compiler made of one kernel. Widths are bytes a thread; ``async_`` are copies straight to shared memory."""

    kernel: str
    variant: str
    arch: int
    registers: int
    spills: int  # instructions that store registers to local memory or load them back
    shared: int  # bytes
    async_16: int
    async_8: int
    async_4: int
    load_16: int
    load_8: int
    load_narrow: int
    mma: int
    hot: bool  # reads the cache at a head dim for which narrow loads would be a fault
    loop: int = 0  # machine instructions of the longest inner loop

    @property
    def wide(self) -> bool:
        """Whether four fifths of the bytes copied to shared memory, the cache itself, come by 16 bytes a thread."""
        return 0 < 16 * self.async_16 >= 0.8 * (16 * self.async_16 + 8 * self.async_8 + 4 * self.async_4)


@dataclass(frozen=True)
class Job:
    kernel: str
    variant: str
    function: Any  # a triton.JITFunction
    args: tuple
    constants: dict
    options: dict
    hot: bool = True


def report(arch: int, select: Callable[[Job], bool] = lambda job: True) -> list[Row]:
    """Compile every kernel for compute capability ``arch`` (80, 90 or 100); one row a kernel and variant.

    Raises RuntimeError under the interpreter, ValueError for an unknown architecture.
    """
    launch.require_triton()
    if launch.interpreting():
        raise RuntimeError("the interpreter is on (TRITON_INTERPRET): nothing can be compiled in this process")
    if arch not in (80, 90, 100):
        raise ValueError(f"arch={arch} must be 80, 90 or 100")
    return [compile_job(job, arch) for job in jobs(arch) if select(job)]


def compile_job(job: Job, arch: int) -> Row:
    """Compile one job as the just-in-time compiler would: same types, same constants, same knowledge about divisibility."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = job.function.arg_names
    signature, constants, attrs = {}, {}, {}
    for i, (param, value) in enumerate(zip(job.function.params, job.args)):
        name = param.name
        if value is None or (isinstance(value, int) and value == 1 and not param.do_not_specialize):
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    for name, value in job.constants.items():
        signature[name], constants[(names.index(name),)] = "constexpr", value
    built = triton.compile(
        ASTSource(job.function, signature, constants, attrs), target=GPUTarget("cuda", arch, 32), options=job.options
    )
    return _read(job, arch, built)


def _read(job: Job, arch: int, built: Any) -> Row:
    ptx = built.asm["ptx"]
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (0x\w+|\d+)", ptx)
    widths = [int(w, 0) for w in copies]
    loads = [_bytes(x) for x in re.findall(r"ld\.global[.\w:]*?(?:\.v\d)?\.b\d+", ptx)]
    code = _tool("nvdisasm", "-c", cubin=built.asm["cubin"])
    spills = len(re.findall(r"\b(?:STL|LDL)\b", code))
    return Row(
        job.kernel, job.variant, arch, _registers(built.asm["cubin"]), spills, built.metadata.shared, widths.count(16), widths.count(8), widths.count(4),
        loads.count(16), loads.count(8), sum(x < 8 for x in loads), len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)), job.hot,
        _loop(code),
    )  # fmt: skip


def _bytes(load: str) -> int:
    vector, bits = re.findall(r"(?:\.v(\d))?\.b(\d+)$", load)[0]
    return int(bits) // 8 * int(vector or 1)


def _tool(name: str, *options: str, cubin: bytes) -> str:
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        return subprocess.run([tool, *options, file], capture_output=True, text=True, check=True).stdout


def _registers(cubin: bytes) -> int:
    return int(re.findall(r"REG:(\d+)", _tool("cuobjdump", "--dump-resource-usage", cubin=cubin))[0])


def _loop(code: str) -> int:
    """Instructions in the longest loop of the machine code that has no loop inside."""
    labels: dict[str, int] = {}
    loops, count = [], 0
    for line in code.splitlines():
        if label := re.match(r"(\.L_x?_?\d+):", line.strip()):
            labels[label.group(1)] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+\S", line):
            count += 1
            jump = re.search(r"BRA.*`\((\.L_x?_?\d+)\)", line)
            if jump and labels.get(jump.group(1), count) < count:
                loops.append((labels[jump.group(1)], count))
    inner = [end - start for start, end in loops if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in loops)]
    return max(inner, default=0)


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def codes(
    batch: int,
    heads: int,
    n: int,
    dim: int,
    bits: int,
    axis: str,
    group_size: int,
    table: bool = False,
    zeros: bool = True,
    format: str = "int",
) -> Codes:
    """Codes without contents."""
    shape = (batch, heads, -(-n // group_size), dim) if axis == "channel" else (batch, heads, n, dim // group_size)
    scale, zero = meta(*shape, dtype=torch.float16), meta(*shape, dtype=torch.float16) if zeros else None
    group = meta(batch, heads, n, dtype=torch.int32) if table else None
    packed = meta(batch, heads, n, dim * bits // 8, dtype=torch.uint8)
    return Codes(packed, scale, zero, bits, axis, group_size, group, format)


def jobs(arch: int) -> Iterator[Job]:
    """Every kernel in the variants that matter."""
    yield from decode_jobs(arch)
    yield from quantize_jobs()
    yield from scored_jobs()
    yield from row_jobs()


def decode_jobs(arch: int) -> Iterator[Job]:
    from . import _decode_kernels as kernels

    batch, kv_heads, n = 8, 8, 32768
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32

    def job(
        variant: str,
        dtype: torch.dtype,
        kv: Pair,
        group: int = 4,
        queries: int = 1,
        hot: bool = True,
        tail: int = 128,
        **options: Any,
    ) -> Job:
        dim = kv[0].shape[3] if isinstance(kv[0], Tensor) else kv[0].head_dim
        q = meta(batch, kv_heads * group, queries, dim, dtype=dtype)
        rest = meta(batch, kv_heads, tail, dim, dtype=dtype) if tail else None
        work = decode.plan(q, *kv, 0.1, residual_k=rest, residual_v=rest, device=pretend(arch), **options)
        return Job("decode_split", variant, kernels.decode_split, work.split_args, work.split_constants, work.options, hot)

    def dense(dtype: torch.dtype, dim: int = 128) -> Pair:
        return meta(batch, kv_heads, n, dim, dtype=dtype), meta(batch, kv_heads, n, dim, dtype=dtype)

    def ints(bits: int, size: int = 64, dim: int = 128, axis: str = "channel", table: bool = False) -> Pair:
        k_size = size if axis == "token" or size & (size - 1) == 0 else 64
        return codes(batch, kv_heads, n, dim, bits, axis, k_size, table), codes(batch, kv_heads, n, dim, bits, "token", size)

    for dtype in (bf16, fp16, fp32):
        yield job(f"{_TYPES[dtype]} dense", dtype, dense(dtype), hot=dtype != fp32)
    for dim in (64, 80, 96, 256):
        yield job(f"bf16 dense d{dim}", bf16, dense(bf16, dim))
    for bits in (8, 4, 2):
        for size in (32, 64, 128):
            yield job(f"int{bits} g{size}", bf16, ints(bits, size))
        yield job(f"int{bits} g64 no residual", bf16, ints(bits), tail=0)
        yield job(f"int{bits} keys per token", bf16, ints(bits, axis="token"))
        yield job(f"int{bits} 16 columns", fp16, ints(bits), group=16)
        yield job(f"int{bits} 16 queries", bf16, ints(bits), queries=16)
        yield job(f"int{bits} bias softcap", bf16, ints(bits), bias=meta(batch, 1, 1, n + 128, dtype=fp32), softcap=30.0)
        yield job(f"int{bits} table", bf16, ints(bits, table=True), hot=False)
        yield job(f"int{bits} fp32", fp32, ints(bits), hot=False)
        for dim, size in ((64, 64), (80, 80), (96, 32), (256, 64)):
            yield job(f"int{bits} d{dim} g{size}", bf16, ints(bits, size, dim), hot=dim == 64 and bits > 2)
    yield job("int4 keys int8 values", bf16, (ints(4)[0], ints(8)[1]))

    def both(bits: int, axis: str = "token", size: int = 128, zeros: bool = True, format: str = "int") -> Pair:
        return (
            codes(batch, kv_heads, n, 128, bits, axis, size, False, zeros, format),
            codes(batch, kv_heads, n, 128, bits, "token", 128, False, zeros, format),
        )

    yield job("int8 symmetric", bf16, both(8, "channel", 64, zeros=False))
    yield job("int4 symmetric", bf16, both(4, "channel", 64, zeros=False))
    yield job("int3 g64", bf16, both(3, "channel", 64), hot=False)
    for format in ("e4m3", "e5m2"):
        yield job(format, bf16, both(8, zeros=False, format=format))
    for bits in (4, 3, 2):
        yield job(f"normal{bits}", bf16, both(bits, zeros=False, format="normal"), hot=False)
    waves, columns = meta(131072, 128, dtype=fp32), meta(batch, kv_heads, n, dtype=torch.int32)
    for bits in (8, 4, 2):
        yield job(f"int{bits} before RoPE", bf16, ints(bits), places=Places(waves), hot=False)
    yield job("int4 before RoPE, kept columns", bf16, ints(4), places=Places(waves, columns), hot=False)
    yield job("bf16 dense before RoPE", bf16, dense(bf16), places=Places(waves), hot=False)
    length = meta(batch, dtype=torch.int32)

    def paged(variant: str, page: int, kv: Pair) -> Job:
        q = meta(batch, kv_heads * 4, 1, 128, dtype=bf16)
        blocks = meta(batch, 1, n // page, dtype=torch.int32)
        work = decode.plan(q, *kv, 0.1, table=blocks, length=length, device=pretend(arch))
        hot = page >= 64  # a smaller one has little to read beside its scales
        return Job("decode_split", variant, kernels.decode_split, work.split_args, work.split_constants, work.options, hot)

    def pool(bits: int, page: int) -> Pair:
        pages = batch * n // page
        return codes(pages, kv_heads, page, 128, bits, "channel", page), codes(pages, kv_heads, page, 128, bits, "token", 64)

    for page in (16, 64):
        blocks = meta(batch * n // page, page, kv_heads, 128, dtype=bf16).transpose(1, 2)
        yield paged(f"bf16 dense pages of {page}", page, (blocks, blocks))
        for bits in (8, 4):
            yield paged(f"int{bits} pages of {page}", page, pool(bits, page))
    for name, kv, cap in (
        ("bf16 dense", dense(bf16), None),
        ("int8", ints(8), None),
        ("int4", ints(4), None),
        ("int4 softcap", ints(4), 30.0),
    ):
        rest = meta(batch, kv_heads, 128, 128, dtype=bf16)
        q = meta(batch, kv_heads * 4, 1, 128, dtype=bf16)
        work = decode.plan(q, *kv, 0.1, residual_k=rest, residual_v=rest, since=0, device=pretend(arch), softcap=cap)
        yield Job("decode_split", f"{name} mass", kernels.decode_split, work.mass_args, work.mass_constants, work.options)
    q, sinks = meta(8, 32, 1, 128, dtype=bf16), meta(32, dtype=bf16)
    work = decode.plan(q, *dense(bf16), 0.1, sinks=sinks, device=pretend(arch))
    yield Job("decode_merge", "bf16 sinks", kernels.decode_merge, work.merge_args, work.merge_constants, {"num_warps": 2}, False)


def quantize_jobs() -> Iterator[Job]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = meta(8, 8, 4096, 128, dtype=dtype)
        for bits in (8, 4, 2):
            for axis, size in (("channel", 64), ("token", 64), ("token", 32)):
                kernel, _, args, constants, options = quantize.plan(x, destination(x, bits, axis, size, torch.float16, None))
                yield Job(f"quantize_{axis}", f"{_TYPES[dtype]} int{bits} g{size}", kernel, args, constants, options, False)


def row_jobs() -> Iterator[Job]:
    """Rows that are rotated and quantized, gathered, or turned on."""
    from . import _row_kernels as kernels

    for dtype in (torch.bfloat16, torch.float32):
        for dim in (64, 128, 256):
            x, matrix = meta(8, 8, 4096, dim, dtype=dtype), meta(dim, dim, dtype=torch.float32)
            for bits in (8, 4, 2):
                out = destination(x, bits, "token", 64, torch.float16, None)
                kernel, _, args, constants, options = quantize.plan(x, out, matrix)
                yield Job("quantize_token", f"{_TYPES[dtype]} int{bits} d{dim} rotated", kernel, args, constants, options, False)
    x, index = meta(8, 8, 4096, 16, dtype=torch.int64), meta(8, 8, 1024, dtype=torch.int64)
    sizes = dict(W=16, ROWS=256, COLUMNS=16)
    yield Job(
        "gather",
        "128 bytes",
        kernels.gather,
        (x, index, x, 8, 1024, *x.stride()[:3], *index.stride()[:2], *x.stride()[:3]),
        sizes,
        {},
        False,
    )
    k, places, waves = (
        meta(8, 8, 4096, 128, dtype=torch.bfloat16),
        meta(8, 8, 4096, dtype=torch.int32),
        meta(131072, 128, dtype=torch.float32),
    )
    args = (k, places, waves, k, 8, 4096, *k.stride()[:3], *places.stride(), 128, *k.stride()[:3], 1.0)
    yield Job("turn", "bf16 d128", kernels.turn, args, dict(D=128, HALF=64, P=64, ROWS=32, STEP=64), {"num_warps": 4}, False)


def scored_jobs() -> Iterator[Job]:
    """Evidence while a prompt is read: Llama-3.1-8B's heads, a window and a soft cap, other head dims."""
    cases: list[tuple[torch.dtype, int, int, dict[str, Any]]] = [
        (torch.bfloat16, 128, 4, {}),
        (torch.float16, 128, 4, {}),
        (torch.bfloat16, 128, 4, {"window": 4096, "softcap": 50.0}),
        (torch.bfloat16, 64, 3, {}),
        (torch.bfloat16, 80, 8, {}),
        (torch.bfloat16, 256, 2, {}),
        (torch.float32, 128, 4, {}),
        (torch.float32, 256, 4, {}),
    ]
    for dtype, dim, group, options in cases:
        q, k, v = (meta(2, heads, 8192, dim, dtype=dtype) for heads in (8 * group, 8, 8))
        work = scored.plan(q, k, v, 0.1, **options)
        name = f"{_TYPES[dtype]} d{dim}" + (" window softcap" if options else "")
        for kernel, _, args in work.launches:
            yield Job(kernel.__name__, name, kernel, args, work.constants, work.options, False)


def pretend(arch: int) -> torch.device:
    """A device name that :func:`launch.capability` answers for without a GPU: its index is the compute capability."""
    return torch.device("meta", arch)


def table(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    fields = ["kernel", "variant", "arch", "registers", "spills", "shared", "async_16", "load_16", "load_narrow", "mma", "loop"]
    lines = ["| " + " | ".join(fields) + " |", "|" + "---|" * len(fields)]
    lines += ["| " + " | ".join(str(asdict(row)[f]) for f in fields) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or ["80", "90", "100"]:
        print(table(report(int(wanted))))
