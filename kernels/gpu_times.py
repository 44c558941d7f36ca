"""Kernels timed on a GPU, against a copy, torch's attention and dequantize-then-attend in the same run."""

from __future__ import annotations

import functools
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import GPU, query, random_codes, size, waves
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvlab_kernels import launch
from kvlab_kernels.decode import decode_attention, paged_decode_attention, scored_decode_attention
from kvlab_kernels.layout import Codes, Places, dequantize
from kvlab_kernels.scored import scored_attention

MODELS = {"Llama-3.1-8B": (32, 8, 128), "Llama-3.1-70B": (64, 8, 128)}
KINDS = ("dense", "int8", "int4", "int2")
GROUP = 64
ROTATE = 400 << 20  # inputs take turns until they exceed this many bytes, so that none is found in the L2 cache
LARGEST = 20 << 30  # bytes of a dense cache


class Clock:
    """How much of the budget is left, and what it left no time for."""

    def __init__(self, budget: float):
        self.end = time.monotonic() + budget
        self.skipped: list[str] = []

    def left(self) -> float:
        return self.end - time.monotonic()

    def skip(self, what: str) -> None:
        self.skipped.append(what)


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
    q, k, v = turns[0]
    read = size(k) + size(v)
    seconds = time_row["ms"] * 1e-3
    products = 4 * q.numel() * tokens_of(k)  # two products, a multiplication and an addition each
    return time_row | {
        "bytes": read,
        "flops": products,
        "GB/s": read / seconds * 1e-9,
        "TFLOP/s": products / seconds * 1e-12,
        "of_copy": read / seconds / copy,
    }


def tokens_of(k: Tensor | Codes) -> int:
    return (k if isinstance(k, Tensor) else k.codes).shape[2]


def roofline(rows: list[dict], bandwidth: float, peak: float) -> None:
    """Adds to each timing where it stands: ``intensity`` (products a byte), ``bound`` (what memory or tensor cores allow at that) and ``of_bound``.

    Williams, Waterman and Patterson 2009. ``bandwidth``: bytes a second of a copy; ``peak``: products a second of a large matrix product, both of this run.
    """
    for row in rows:
        if "flops" in row:
            row["intensity"] = row["flops"] / row["bytes"]
            row["bound"] = "memory" if row["intensity"] * bandwidth < peak else "compute"
            row["of_bound"] = row["flops"] / (row["ms"] * 1e-3) / min(peak, row["intensity"] * bandwidth)


def matrix_peak() -> float:
    """Products a second (additions counted) of a large bfloat16 matrix product."""
    a = torch.randn(8192, 8192, device=GPU, dtype=torch.bfloat16)
    taken = []
    for _ in range(20):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        a @ a
        stop.record()
        torch.cuda.synchronize()
        taken.append(start.elapsed_time(stop))
    return 2 * 8192**3 / (statistics.median(taken[5:]) * 1e-3)


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


def prefill(report: dict, clock: Clock) -> None:
    """Evidence while a prompt is read: ``scored_attention`` against FlashAttention alone, causal, and the bytes beside inputs and output."""
    heads, kv_heads, dim = MODELS["Llama-3.1-8B"]
    for tokens in (4096, 16384, 32768):
        if clock.left() < 10:
            clock.skip(f"prefill {tokens}")
            continue
        row: dict = {"name": "scored_attention", "model": "Llama-3.1-8B", "batch": 1, "tokens": tokens}
        q, k, v = (
            query(1, heads, tokens, dim, dtype=torch.bfloat16),
            *(query(1, kv_heads, tokens, dim, dtype=torch.bfloat16) for _ in range(2)),
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            row["flash_ms"] = timed(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), [(q, k, v)], 30.0
            )["ms"]
        row["ms"] = timed(lambda q, k, v: scored_attention(q, k, v, scaling=dim**-0.5), [(q, k, v)], 30.0)["ms"]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = scored_attention(q, k, v, scaling=dim**-0.5)
        row["extra_bytes"] = torch.cuda.max_memory_allocated() - before - found[0].nbytes
        row["times_flash"] = row["ms"] / row["flash_ms"]
        report["prefill"].append(row)


def variants(report: dict, clock: Clock) -> None:
    """What else decode attention reads, at one point: pages, keys from before RoPE, 8-bit floats, three bits, mixed lengths, and the mass beside it."""
    batch, context = 8, 32768
    heads, kv_heads, dim = MODELS["Llama-3.1-8B"]
    table = waves(context, dim)

    def paged(page: int, kind: str) -> tuple[Callable[..., object], list[tuple]]:
        pages = batch * context // page
        blocks = torch.randperm(pages, device=GPU).view(batch, 1, -1).int()
        q = query(batch, heads, 1, dim, dtype=torch.bfloat16)
        if kind == "dense":
            pools = [torch.randn(pages, page, kv_heads, dim, device=GPU, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
        else:
            pools = [
                random_codes(pages, kv_heads, page, dim, int(kind[3:]), axis, min(page, GROUP)) for axis in ("channel", "token")
            ]
        return (lambda q, k, v: paged_decode_attention(q, k, v, blocks, length=context, scaling=0.088)), [(q, *pools)]

    def plain(bits: int, axis: str, own: dict, **options: Any) -> tuple[Callable[..., object], list[tuple]]:
        q = query(batch, heads, 1, dim, dtype=torch.bfloat16)
        k = random_codes(batch, kv_heads, context, dim, bits, axis, GROUP if axis == "channel" else dim, **own)
        v = random_codes(batch, kv_heads, context, dim, bits, "token", dim, **own)
        return (lambda q, k, v: decode_attention(q, k, v, scaling=0.088, **options)), [(q, k, v)]

    def scored(kind: str) -> tuple[Callable[..., object], list[tuple]]:
        return (lambda q, k, v: scored_decode_attention(q, k, v, scaling=0.088)), [inputs(kind, "Llama-3.1-8B", batch, context)]

    def mixed() -> tuple[Callable[..., object], list[tuple]]:
        _, turns = paged(64, "int8")
        length = torch.linspace(context // 16, context, batch, device=GPU).int()
        blocks = torch.randperm(batch * context // 64, device=GPU).view(batch, 1, -1).int()
        return (lambda q, k, v: paged_decode_attention(q, k, v, blocks, length=length, scaling=0.088)), turns

    tried: dict[str, Callable[[], tuple[Callable[..., object], list[tuple]]]] = {
        **{
            f"{kind} pages of {page}": functools.partial(paged, page, kind)
            for kind in ("dense", "int8", "int4")
            for page in (16, 64)
        },
        "int8 pages of 64, lengths from a 16th": mixed,
        "e4m3": lambda: plain(8, "token", {"zeros": False, "format": "e4m3"}),
        "int3": lambda: plain(3, "channel", {}),
        "int4 symmetric": lambda: plain(4, "channel", {"zeros": False}),
        "normal4": lambda: plain(4, "token", {"format": "normal"}),
        "int4 before RoPE": lambda: plain(4, "channel", {}, places=Places(table)),
        "int8 before RoPE": lambda: plain(8, "channel", {}, places=Places(table)),
        "dense with mass": lambda: scored("dense"),
        "int4 with mass": lambda: scored("int4"),
    }
    for name, make in tried.items():
        if clock.left() < 10:
            clock.skip(f"variant {name}")
            continue
        row: dict = {"name": name, "model": "Llama-3.1-8B", "batch": batch, "context": context}
        try:
            call, turns = make()
            row |= rate(timed(call, turns), turns, report["copy_bytes_per_second"])
            if "pages" in name:  # a pool has its tokens in another dim
                row["flops"] = 4 * turns[0][0].numel() * context
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        report["variants"].append(row)
        turns = []
        torch.cuda.empty_cache()


def marks(report: dict) -> dict:
    """What others report, and the same case here: FlashMLA's share of the memory's bandwidth in decode (0.90 of it on an H800)."""
    rows = [r for r in report["benchmark"] if r.get("name") in KINDS and "of_copy" in r]
    best = {kind: max((r["of_copy"] for r in rows if r["name"] == kind), default=None) for kind in KINDS}
    return {"FlashMLA reports (share of the memory's bandwidth)": 3000 / 3350, "here, best share of a copy's": best}


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
