"""Check and time the kernels on a GPU: ``python kernels/gpu.py --out FILE.json [--quick] [--budget SECONDS]``.

Needs torch, triton and a CUDA device; no network, no notebook, no installation. In three steps:

1. Every kernel against float64, in several processes at once (compiling is what takes the time), memory poisoned, each case three times, which
   must give the same bits. A case that fails, even one that takes its process down, is recorded with its traceback, and the rest go on.
2. A search over launch settings at 32K tokens, batch 8, Llama-3.1-8B heads.
3. The benchmark: dense, int8, int4 and int2 caches against the best of torch's attention backends on dense bfloat16, and against
   dequantize-then-attend; bandwidth as a fraction of a device copy in the same run.

The exit code is 1 if a case failed. What the budget leaves no time for is listed under "skipped".
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab_kernels import launch
from kvlab_kernels.decode import decode_attention
from kvlab_kernels.layout import Codes, dequantize, unpack
from kvlab_kernels.quantize import quantize
from kvlab_kernels.reference import quantize_torch

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
GPU = torch.device("cuda")
MODELS = {"Llama-3.1-8B": (32, 8, 128), "Llama-3.1-70B": (64, 8, 128)}
KINDS = ("dense", "int8", "int4", "int2")
GROUP = 64
ROTATE = 400 << 20  # inputs take turns until they exceed this many bytes, so that none is found in the L2 cache
LARGEST = 20 << 30  # bytes of a dense cache


# -- caches ---------------------------------------------------------------------------------------------------------------------------


def random_codes(batch: int, heads: int, n: int, dim: int, bits: int, axis: str, group_size: int, *, table: bool = False, capacity: int = 0,
                 scale_dtype: torch.dtype = torch.float16) -> Codes:  # fmt: skip
    """Codes of every value; scales behind the last token are NaN."""
    capacity = max(capacity, n)
    groups = -(-capacity // group_size) if axis == "channel" else capacity
    shape = (batch, heads, groups, dim if axis == "channel" else dim // group_size)
    codes = torch.randint(0, 256, (batch, heads, capacity, dim * bits // 8), dtype=torch.uint8, device=GPU)
    scale = (torch.rand(shape, device=GPU) + 0.5).div(2 ** (bits - 1)).to(scale_dtype)
    zero = (torch.randn(shape, device=GPU) * 0.5 - 1).to(scale_dtype)
    used = -(-n // group_size) if axis == "channel" else n
    scale[:, :, used:], zero[:, :, used:] = torch.nan, torch.nan
    group = torch.randint(0, max(used, 1), (batch, heads, n), device=GPU).sort(-1).values.int() if table else None
    return Codes(codes[:, :, :n], scale[:, :, :used], zero[:, :, :used], bits, axis, group_size, group)


def size(x: Tensor | Codes) -> int:
    """Bytes a kernel must read."""
    tensors = [x] if isinstance(x, Tensor) else [t for t in (x.codes, x.scale, x.zero, x.group) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


# -- float64 --------------------------------------------------------------------------------------------------------------------------


def values(x: Tensor | Codes) -> Tensor:
    if isinstance(x, Tensor):
        return x.double()
    code, scale, zero = unpack(x.codes, x.bits).double(), x.scale.double(), x.zero.double()
    if x.axis == "token":
        return code * scale.repeat_interleave(x.group_size, -1) + zero.repeat_interleave(x.group_size, -1)
    row = (
        x.group.long()
        if x.group is not None
        else (torch.arange(code.shape[2], device=GPU) // x.group_size).expand(code.shape[:3])
    )
    row = row[..., None].expand(code.shape)
    return code * scale.gather(2, row) + zero.gather(2, row)


def exact(
    q, k, v, scaling, bias=None, softcap=None, sinks=None, length=None, residual_k=None, residual_v=None
) -> tuple[Tensor, Tensor]:
    k, v = values(k), values(v)
    batch, heads, queries, dim = q.shape
    kv_heads, n = k.shape[1:3]
    hidden = torch.zeros(batch, 1, 1, n, device=GPU, dtype=torch.bool)
    if length is not None:
        hidden = (torch.arange(n, device=GPU) >= torch.as_tensor(length, device=GPU).expand(batch)[:, None])[:, None, None]
    if residual_k is not None:
        k, v = torch.cat([k, residual_k.double()], 2), torch.cat([v, residual_v.double()], 2)
        hidden = F.pad(hidden, (0, residual_k.shape[2]))
    s = q.double().view(batch, kv_heads, -1, dim) @ k.mT * scaling
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.view(batch, kv_heads, -1, queries, k.shape[2])
    if bias is not None:
        s = s + bias.double()[:, :, None]
    s = s.masked_fill(hidden[:, :, None], -torch.inf).view(batch, heads, queries, -1)
    if sinks is not None:
        s = torch.cat([s, sinks.double().view(1, -1, 1, 1).expand(batch, heads, queries, 1)], -1)
    lse = torch.logsumexp(s, -1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()[..., : k.shape[2]]
    return (p.view(batch, kv_heads, -1, k.shape[2]) @ v).view(q.shape), lse


# -- step 1: cases --------------------------------------------------------------------------------------------------------------------


def poison() -> None:
    """From now on memory from torch.empty is full of NaN, so that what a kernel leaves out shows."""
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    torch.empty = empty


def compare(q: Tensor, k: Tensor | Codes, v: Tensor | Codes, **options) -> dict:
    scaling = q.shape[-1] ** -0.5
    runs = [decode_attention(q, k, v, scaling=scaling, **options) for _ in range(3)]
    for out, lse in runs[1:]:
        assert torch.equal(out, runs[0][0]) and torch.equal(lse, runs[0][1]), "three runs gave different bits"
    out, lse = runs[0]
    want, lse64 = exact(q, k, v, scaling, **{name: x for name, x in options.items() if name not in ("splits", "settings")})
    return verdict(out, lse, want, lse64)


def verdict(out: Tensor, lse: Tensor, want: Tensor, lse64: Tensor) -> dict:
    blind = lse64 == -torch.inf
    assert torch.equal(lse == -torch.inf, blind), "log-sum-exp is -inf in the wrong rows"
    assert not out[blind].any(), "rows that see nothing must be zero"
    error = float((out.double() - want).norm() / want.norm().clamp_min(1e-30))
    off = float((lse.double() - lse64)[~blind].abs().max()) if (~blind).any() else 0.0
    tolerance = TOLERANCE[out.dtype]
    assert error < tolerance, f"relative error {error:.2e}, allowed {tolerance:.0e}"
    assert off < 2 * tolerance * (1 + float(lse64[~blind].abs().max() if (~blind).any() else 0)), f"log-sum-exp off by {off:.2e}"
    return {"error": error, "lse": off}


def query(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=GPU).to(dtype)


def side(kind, batch: int, heads: int, n: int, dim: int, dtype: torch.dtype, **options) -> Tensor | Codes:
    return query(batch, heads, n, dim, dtype=dtype) if kind == "dense" else random_codes(batch, heads, n, dim, *kind, **options)


def decode_case(dtype, k_kind, v_kind, *, n=777, dim=128, heads=8, kv_heads=2, queries=1, batch=2, tail=0, capacity=0, table=False, masked=False,
                sinks=False, blind=False, scale_dtype=torch.float16, **options) -> Callable[[], dict]:  # fmt: skip
    def run() -> dict:
        q = query(batch, heads, queries, dim, dtype=dtype)
        given = dict(capacity=capacity, scale_dtype=scale_dtype)
        k = side(k_kind, batch, kv_heads, n, dim, dtype, **({} if k_kind == "dense" else {**given, "table": table}))
        v = side(v_kind, batch, kv_heads, n, dim, dtype, **({} if v_kind == "dense" else given))
        more = dict(options)
        if tail:
            more |= dict(
                residual_k=query(batch, kv_heads, tail, dim, dtype=dtype),
                residual_v=query(batch, kv_heads, tail, dim, dtype=dtype),
            )
        if masked or blind:
            bias = torch.randn(batch, kv_heads, queries, n + tail, device=GPU)
            more["bias"] = bias.masked_fill(torch.rand(n + tail, device=GPU) < 0.4, -torch.inf)
            if blind:
                more["bias"][0] = -torch.inf
                more["bias"][:, :, :, : n // 2] = -torch.inf
        if sinks:
            more["sinks"] = query(heads, dtype=dtype)
        if more.get("length") == "rows":
            more["length"] = torch.tensor([0] + [n - 5] * (batch - 1), device=GPU, dtype=torch.int32)
        return compare(q, k, v, **more)

    return run


def far_case(bits: int) -> Callable[[], dict]:
    """A cache whose last tokens lie beyond 2**31 elements; only they may be seen."""

    def run() -> dict:
        dim, kept = 128, 300
        n = (1 << 31) // dim + 4099
        bias = torch.full((1, 1, 1, n), -torch.inf, device=GPU)
        bias[..., -kept:] = 0
        q = query(1, 4, 1, dim, dtype=torch.bfloat16)
        if bits == 16:
            k, v = (torch.zeros(1, 1, n, dim, device=GPU, dtype=torch.bfloat16) for _ in range(2))
            for x in (k, v):
                x[:, :, -kept:] = torch.randn(kept, dim, device=GPU)
            near_k, near_v = k[:, :, -kept:], v[:, :, -kept:]
        else:
            k = random_codes(1, 2, n, dim, bits, "token", 128)
            v = random_codes(1, 2, n, dim, bits, "token", 128)
            near_k, near_v = (
                Codes(x.codes[:, :, -kept:], x.scale[:, :, -kept:], x.zero[:, :, -kept:], bits, "token", 128) for x in (k, v)
            )
        out, lse = decode_attention(q, k, v, scaling=dim**-0.5, bias=bias)
        return verdict(out, lse, *exact(q, near_k, near_v, dim**-0.5))

    return run


def quantize_case(
    dtype: torch.dtype, bits: int, axis: str, group: int, n: int, dim: int, scale_dtype: torch.dtype
) -> Callable[[], dict]:
    def run() -> dict:
        x = (torch.randn(2, n, 3, dim, device=GPU) * torch.logspace(-4, 3, dim, device=GPU)).to(dtype).transpose(1, 2)
        x[0, 0] = 3.3
        got, want = quantize(x, bits, axis, group, scale_dtype), quantize_torch(x.cpu(), bits, axis, group, scale_dtype)
        for name in ("codes", "scale", "zero"):
            a, b = getattr(got, name).cpu(), getattr(want, name)
            assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ from torch"
        return {"error": 0.0}

    return run


def cases() -> dict[str, Callable[[], dict]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found: dict[str, Callable[[], dict]] = {}

    def add(name: str, run: Callable[[], dict]) -> None:
        found[name] = run

    for dtype in (bf16, fp16, fp32):
        add(f"decode dense {NAMES[dtype]}", decode_case(dtype, "dense", "dense", tail=33, masked=True))
        for bits in (8, 4, 2):
            add(f"decode int{bits} {NAMES[dtype]}", decode_case(dtype, (bits, "channel", 64), (bits, "token", 64), tail=128))
        add(f"decode int4 keys per token {NAMES[dtype]}", decode_case(dtype, (4, "token", 32), (4, "token", 32), n=701))
        add(f"decode int8 softcap sinks {NAMES[dtype]}",
            decode_case(dtype, (8, "channel", 32), (8, "token", 128), softcap=20.0, sinks=True, masked=True, tail=7, queries=3))  # fmt: skip
        add(
            f"decode int4 blind rows {NAMES[dtype]}",
            decode_case(dtype, (4, "channel", 64), (4, "token", 64), blind=True, splits=5),
        )
    for dim in (64, 80, 96, 256):
        small = {64: 32, 80: 40, 96: 32, 256: 64}[dim]
        add(f"decode dense d{dim}", decode_case(bf16, "dense", "dense", dim=dim, n=513))
        for bits in (8, 4, 2):
            add(
                f"decode int{bits} d{dim}",
                decode_case(fp16, (bits, "channel", 64), (bits, "token", small), dim=dim, n=513, tail=5),
            )
    for n in (1, 63, 64, 65, 4097):
        add(f"decode int8 n{n}", decode_case(fp16, (8, "channel", 64), (8, "token", 64), n=n))
        add(f"decode int4 n{n}", decode_case(bf16, (4, "channel", 64), (4, "token", 64), n=n))
    for heads in (1, 5, 7, 16):
        add(f"decode int4 {heads} heads a group", decode_case(bf16, (4, "channel", 64), (4, "token", 64), heads=2 * heads))
    add("decode int8 16 queries", decode_case(fp16, (8, "channel", 64), (8, "token", 64), queries=16, masked=True))
    add("decode int4 keys int8 values", decode_case(bf16, (4, "channel", 64), (8, "token", 64)))
    add("decode int8 keys dense values", decode_case(bf16, (8, "channel", 64), "dense"))
    for bits in (8, 4, 2):
        add(f"decode int{bits} table", decode_case(bf16, (bits, "channel", 64), (bits, "token", 64), table=True, n=300))
        add(
            f"decode int{bits} capacity",
            decode_case(fp16, (bits, "channel", 32), (bits, "token", 32), n=611, capacity=1024, length=600),
        )
    add("decode int8 uneven groups", decode_case(bf16, (8, "channel", 20), (8, "token", 64), n=300))
    add("decode int4 float32 scales", decode_case(fp16, (4, "channel", 64), (4, "token", 64), scale_dtype=fp32))
    add("decode int4 lengths", decode_case(bf16, (4, "channel", 64), (4, "token", 64), length="rows", splits=4, batch=3))
    add("decode int4 more splits than tiles", decode_case(bf16, (4, "channel", 64), (4, "token", 64), n=100, splits=9))
    add("decode int8 beyond 2**31", far_case(8))
    add("decode dense beyond 2**31", far_case(16))
    for dtype in (bf16, fp32):
        for bits in (8, 4, 2):
            for axis, group, n, dim in (
                ("channel", 64, 320, 128),
                ("channel", 20, 100, 80),
                ("token", 64, 333, 128),
                ("token", 32, 100, 96),
            ):
                for scale_dtype in (fp16, fp32):
                    name = f"quantize int{bits} {axis} g{group} d{dim} {NAMES[dtype]} scales {NAMES[scale_dtype]}"
                    add(name, quantize_case(dtype, bits, axis, group, n, dim, scale_dtype))
    return found


def warm_ups(quick: bool) -> dict[str, Callable[[], dict]]:
    """One call for everything that will be timed, so that it is compiled by then."""
    found = {}
    for kind in KINDS:
        for candidate in candidates(kind, quick):
            found[f"warm {kind} {candidate}"] = lambda kind=kind, candidate=candidate: attend_once(kind, candidate)
    return found


def attend_once(kind: str, settings: launch.Settings) -> dict:
    q, k, v = inputs(kind, "Llama-3.1-8B", 8, 32768)
    decode_attention(q, k, v, scaling=0.1, settings=settings)
    torch.cuda.synchronize()
    return {}


def work(index: int, workers: int, skip: int, out: Path, deadline: float, quick: bool) -> None:
    """One worker: every ``workers``-th task, a line of JSON for each."""
    poison()
    tasks = list((cases() | warm_ups(quick)).items())[index::workers]
    for position, (name, run) in enumerate(tasks):
        if position < skip:
            continue
        row: dict = {"name": name}
        start = time.monotonic()
        fatal = False
        if time.time() > deadline:
            row["skipped"] = True
        else:
            torch.manual_seed(position)
            try:
                row |= run()
                torch.cuda.synchronize()
                row["ok"] = True
            except Exception as error:
                row |= {"ok": False, "traceback": traceback.format_exc()[-4000:]}
                fatal = "CUDA error" in str(error) or "illegal" in str(error)
        row["seconds"] = round(time.monotonic() - start, 2)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if fatal:  # the context is gone: go on in a new process
            os.execv(
                sys.executable,
                [sys.executable, __file__, "--worker", f"{index},{workers},{position + 1},{out},{deadline},{int(quick)}"],
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_workers(quick: bool, seconds: float) -> list[dict]:
    count = max(1, min(12, (os.cpu_count() or 2) - 2))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{i}.jsonl") for i in range(count)]
        deadline = time.time() + seconds
        logs = [file.with_suffix(".log") for file in files]
        processes = []
        for i, (file, log) in enumerate(zip(files, logs)):
            command = [sys.executable, __file__, "--worker", f"{i},{count},0,{file},{deadline},{int(quick)}"]
            with log.open("w") as errors:
                processes.append(subprocess.Popen(command, stderr=errors))
        rows = []
        for i, (process, file, log) in enumerate(zip(processes, files, logs)):
            try:
                process.wait(timeout=max(1.0, deadline + 20 - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if file.exists():
                rows += [json.loads(line) for line in file.read_text().splitlines()]
            if process.returncode:
                rows.append(
                    {
                        "name": f"worker {i}",
                        "ok": False,
                        "traceback": f"exit code {process.returncode}\n{log.read_text()[-4000:]}",
                    }
                )
    return rows


# -- step 2 and 3: time ---------------------------------------------------------------------------------------------------------------


def inputs(kind: str, model: str, batch: int, context: int) -> tuple[Tensor, Tensor | Codes, Tensor | Codes]:
    heads, kv_heads, dim = MODELS[model]
    q = query(batch, heads, 1, dim, dtype=torch.bfloat16)
    if kind == "dense":
        return q, *(torch.randn(batch, kv_heads, context, dim, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    bits = int(kind[3:])
    return (
        q,
        random_codes(batch, kv_heads, context, dim, bits, "channel", GROUP),
        random_codes(batch, kv_heads, context, dim, bits, "token", GROUP),
    )


def rotating(kind: str, model: str, batch: int, context: int) -> list[tuple]:
    """As many independent inputs as it takes to overflow the L2 cache many times."""
    first = inputs(kind, model, batch, context)
    more = min(400, ROTATE // (size(first[1]) + size(first[2])))
    return [first, *(inputs(kind, model, batch, context) for _ in range(more))]


def timed(call: Callable[..., object], turns: list[tuple], milliseconds: float = 3.0) -> dict:
    """Median milliseconds of a call. The calls of one pass are captured in a CUDA graph, as serving engines do, so that the time is the GPU's."""
    call(*turns[0])
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(*turns[-1])
    end.record()
    end.synchronize()
    once = max(start.elapsed_time(end), 1e-3)
    count = max(len(turns), min(200, int(milliseconds / once) + 1))

    def body() -> None:
        for i in range(count):
            call(*turns[i % len(turns)])

    graph: torch.cuda.CUDAGraph | None = torch.cuda.CUDAGraph()
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(*turns[0])
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            body()
        run = graph.replay
    except Exception:
        graph, run = None, body
        torch.cuda.synchronize()
    run()
    times = []
    for _ in range(7):
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    del graph
    return {"ms": statistics.median(times), "spread": (max(times) - min(times)) / min(times), "graph": run is not body}


def copy_bandwidth() -> float:
    """Bytes a second of a device-to-device copy, read and written counted.

    Launched plainly, not as a graph: a graph's copy node moves far less (seen on an H200: 2.8 against 4.3 TB/s), and what it is compared
    with must be the best the device can do.
    """
    a = torch.randn(1 << 30, dtype=torch.float32, device=GPU)
    b = torch.empty_like(a)
    taken = []
    for _ in range(20):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        b.copy_(a)
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop))
    return 2 * a.nbytes / (statistics.median(taken[5:]) * 1e-3)


def candidates(kind: str, quick: bool) -> list[launch.Settings]:
    """Settings worth trying: tiles, warps, stages; the number of programs is varied afterwards, without compiling anew."""
    base = default(kind)
    found = [base]
    for block_n in (32, 64, 128) if kind == "dense" else (32, 64):
        for warps in (2, 4, 8) if kind == "dense" else (1, 2, 4):
            for stages in (2, 3, 4):
                found.append(replace(base, block_n=block_n, num_warps=warps, num_stages=stages))
    if kind != "dense":
        found += [replace(base, num_stages=s, maxnreg=168) for s in (2, 3)]
    found = list(dict.fromkeys(found))
    return found[:: 3 if quick else 1]


def default(kind: str) -> launch.Settings:
    return launch.settings(GPU, 16 if kind == "dense" else int(kind[3:]), 128, 8)


def attend(settings: launch.Settings | None) -> Callable[..., object]:
    return lambda q, k, v: decode_attention(q, k, v, scaling=0.088, settings=settings)


def search(report: dict, clock: Clock, quick: bool) -> dict[str, launch.Settings]:
    best: dict[str, launch.Settings] = {}
    names = list(asdict(launch.Settings()))
    for kind in ("int8", "int4", "dense", "int2"):
        turns = rotating(kind, "Llama-3.1-8B", 8, 32768)
        tried: dict[launch.Settings, dict] = {}
        for candidate in candidates(kind, quick):
            if clock.left() < 60:
                clock.skip(f"search {kind} {candidate}")
            else:
                tried[candidate] = measure(kind, candidate, turns, report["copy_bytes_per_second"])
        good = sorted((c for c in tried if "ms" in tried[c]), key=lambda c: tried[c]["ms"])
        for chosen in good[:3]:
            for programs in (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32):
                candidate = replace(chosen, programs_per_sm=programs)
                if candidate not in tried and clock.left() > 60:
                    tried[candidate] = measure(kind, candidate, turns, report["copy_bytes_per_second"])
        rows = sorted(tried.values(), key=lambda row: row.get("ms", 1e9))
        report["search"] += rows
        if rows and "ms" in rows[0]:
            best[kind] = launch.Settings(**{name: rows[0][name] for name in names})
            print(f"search {kind}: {best[kind]}  {rows[0]['ms']:.4f} ms, {rows[0]['of_copy']:.1%} of copy", flush=True)
        turns.clear()
        torch.cuda.empty_cache()
    return best


def measure(kind: str, candidate: launch.Settings, turns: list[tuple], copy: float) -> dict:
    row: dict = {"kind": kind, **asdict(candidate)}
    try:
        return row | rate(timed(attend(candidate), turns), turns, copy)
    except Exception:
        return row | {"traceback": traceback.format_exc()[-1500:]}


def rate(time_row: dict, turns: list[tuple], copy: float) -> dict:
    """A timing with the bytes of the cache it read, and their speed as a fraction of a copy's."""
    read = size(turns[0][1]) + size(turns[0][2])
    speed = read / (time_row["ms"] * 1e-3)
    return time_row | {"bytes": read, "GB/s": speed * 1e-9, "of_copy": speed / copy}


def sdpa(backend: SDPBackend, packed: bool) -> Callable[..., object]:
    """torch's attention; ``packed`` lays the query heads of a group along the query axis, which decoding without a mask allows."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            if packed:
                return F.scaled_dot_product_attention(q.view(k.shape[0], k.shape[1], -1, k.shape[3]), k, v, scale=0.088)
            return F.scaled_dot_product_attention(q, k, v, scale=0.088, enable_gqa=True)

    return call


def baselines() -> dict[str, Callable[..., object]]:
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return {
        f"sdpa {name}{' packed' if packed else ''}": sdpa(backend, packed)
        for name, backend in backends.items()
        for packed in (False, True)
    }


def dequantize_first(q: Tensor, k: Codes, v: Codes) -> Tensor:
    dense = dequantize(k, torch.bfloat16), dequantize(v, torch.bfloat16)
    return F.scaled_dot_product_attention(q, *dense, scale=0.088, enable_gqa=True)


def benchmark(report: dict, clock: Clock, best: dict[str, launch.Settings], quick: bool) -> None:
    points = [(m, b, n) for m in MODELS for n in (2048, 8192, 32768, 131072) for b in (1, 8, 64)]
    points = [p for p in points if p[1] * p[2] * 2 * MODELS[p[0]][1] * MODELS[p[0]][2] * 2 <= LARGEST]
    first = [("Llama-3.1-8B", 8, 32768), ("Llama-3.1-8B", 1, 131072), ("Llama-3.1-70B", 8, 32768)]
    points = first if quick else first + [p for p in points if p not in first]
    for model, batch, context in points:
        where = {"model": model, "batch": batch, "context": context}
        if clock.left() < 12:
            clock.skip(f"benchmark {where}")
            continue
        tried: list[tuple[str, str, Callable[..., object]]] = [(kind, kind, attend(best.get(kind))) for kind in KINDS]
        tried += [(name, "dense", call) for name, call in baselines().items()]
        if batch * context <= 8 * 32768:
            tried += [(f"dequantize {kind} then sdpa", kind, dequantize_first) for kind in ("int8", "int4")]
        turns, loaded = [], ""
        for name, kind, call in sorted(tried, key=lambda t: KINDS.index(t[1])):
            row: dict = {**where, "name": name}
            try:
                if loaded != kind:
                    turns = []
                    torch.cuda.empty_cache()
                    turns, loaded = rotating(kind, model, batch, context), kind
                milliseconds = 1.0 if "dequantize" in name else 3.0
                row |= rate(timed(call, turns, milliseconds), turns, report["copy_bytes_per_second"])
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
            report["benchmark"].append(row)
        del turns
        torch.cuda.empty_cache()


def eager_overhead(report: dict) -> None:
    """Microseconds the host needs for one call without a CUDA graph, at a context so short that the GPU waits for it."""
    q, k, v = inputs("int8", "Llama-3.1-8B", 1, 512)
    for _ in range(5):
        decode_attention(q, k, v, scaling=0.1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        decode_attention(q, k, v, scaling=0.1)
    torch.cuda.synchronize()
    report["eager_microseconds"] = (time.perf_counter() - start) * 1e4


# -- the report -----------------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, budget: float):
        self.end = time.monotonic() + budget
        self.skipped: list[str] = []

    def left(self) -> float:
        return self.end - time.monotonic()

    def skip(self, what: str) -> None:
        self.skipped.append(what)


def table(report: dict) -> str:
    lines = [
        f"{'model':14} {'batch':>5} {'context':>7} {'best sdpa':>22} "
        + " ".join(f"{kind + ' ms (of copy, x sdpa)':>27}" for kind in KINDS)
    ]
    points = dict.fromkeys((r["model"], r["batch"], r["context"]) for r in report["benchmark"])
    for point in points:
        rows = {r["name"]: r for r in report["benchmark"] if (r["model"], r["batch"], r["context"]) == point and "ms" in r}
        dense = min((r for name, r in rows.items() if name.startswith("sdpa")), key=lambda r: r["ms"], default=None)
        cells = [f"{dense['name'][5:] + format(dense['ms'], ' 9.4f') if dense else 'none':>22}"]
        for kind in KINDS:
            r = rows.get(kind)
            cells.append(
                f"{r['ms']:10.4f} ({r['of_copy']:5.1%}, {dense['ms'] / r['ms'] if dense else 0:5.2f}x)".rjust(27)
                if r
                else "-".rjust(27)
            )
        lines.append(f"{point[0]:14} {point[1]:5} {point[2]:7} " + " ".join(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer settings and points")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        index, workers, skip, out, deadline, quick = options.worker.split(",")
        work(int(index), int(workers), int(skip), Path(out), float(deadline), quick == "1")
        return 0
    if options.out is None:
        parser.error("--out is required")
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    import triton

    clock = Clock(options.budget)
    properties = torch.cuda.get_device_properties(0)
    report: dict = {
        "device": properties.name, "capability": f"{properties.major}.{properties.minor}", "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__, "triton": triton.__version__, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv[1:]),
        "cases": [], "search": [], "benchmark": [],
    }  # fmt: skip

    def save() -> None:
        report["skipped"] = clock.skipped
        report["seconds"] = round(options.budget - clock.left(), 1)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))

    rows = run_workers(options.quick, options.budget * 0.45)
    report["warm_up_failed"] = [r for r in rows if r["name"].startswith("warm") and not r.get("ok") and not r.get("skipped")]
    report["cases"] = [r for r in rows if not r["name"].startswith("warm")]
    clock.skipped += [r["name"] for r in rows if r.get("skipped")]
    failed = [r for r in report["cases"] if not r.get("ok") and not r.get("skipped")]
    print(
        f"{sum(bool(r.get('ok')) for r in report['cases'])} cases right, {len(failed)} wrong, after {options.budget - clock.left():.0f} s",
        flush=True,
    )
    for row in failed:
        print(f"WRONG {row['name']}: {row['traceback'].strip().splitlines()[-1][:200]}", flush=True)
    save()
    best: dict[str, launch.Settings] = {}
    steps: list[tuple[str, Callable[[], object]]] = [
        ("copy", lambda: report.update(copy_bytes_per_second=copy_bandwidth())),
        ("eager", lambda: eager_overhead(report)),
        ("search", lambda: best.update(search(report, clock, options.quick))),
        ("benchmark", lambda: benchmark(report, clock, best, options.quick)),
    ]
    for name, step in steps:
        try:
            step()
        except Exception:
            report[f"{name}_traceback"] = traceback.format_exc()
            print(f"{name} stopped: {traceback.format_exc().strip().splitlines()[-1]}", flush=True)
        save()
    report["best"] = {kind: asdict(settings) for kind, settings in best.items()}
    save()
    print(
        f"{report['device']}, copy {report.get('copy_bytes_per_second', 0) / 1e9:.0f} GB/s, eager {report.get('eager_microseconds', 0):.0f} us a call"
    )
    print(table(report))
    if clock.skipped:
        print(f"skipped for lack of time: {len(clock.skipped)}, the first: {clock.skipped[0]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
