"""Decode steps of a whole model after tokens of random keys and values: no prompt is read, so weights may be random and contexts long.

``python -m kvlab.measure.whole_model FILE`` times a model of Llama-3.1-8B's shape on a GPU, strategies against the full cache, and writes the rows as JSON.
"""

from __future__ import annotations

import datetime
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvlab import attention
from kvlab.cache import KVCache, forward
from kvlab.lab import Progress
from kvlab.measure.machine import machine
from kvlab.strategy import Strategy

Row = dict[str, Any]
keep: Any = importlib.import_module("kvlab.keep")
store: Any = importlib.import_module("kvlab.store")


def bench_model(
    model: Any,
    strategies: list[Strategy],
    *,
    tokens: int,
    batch: int = 1,
    steps: int = 16,
    peer: bool = True,
    progress: Progress | None = None,
) -> list[Row]:
    """Whole-model decode steps after ``tokens`` tokens -> a row a strategy: median seconds a step, tokens a second, bytes.

    ``peer``: transformers' ``DynamicCache`` with SDPA comes first. On a GPU each row of ours also has ``captured``: seconds of a step that was recorded as
    a CUDA graph, as serving engines replay it; what Python costs between kernels is not in it. None, and ``why``, where a step could not be recorded.
    Raises ``ValueError`` for fewer than 1 token, row or step.
    """
    for name, value in (("tokens", tokens), ("batch", batch), ("steps", steps)):
        if value < 1:
            raise ValueError(f"{name}={value} is out of range (allowed: 1 or more)")
    rows = []
    everyone: list[Strategy | None] = [None, *strategies] if peer else [*strategies]
    for number, strategy in enumerate(everyone):
        if progress:
            progress("whole model", number, len(everyone))
        rows.append(_row(model, strategy, tokens, batch, steps))
    attention.detach(model)
    return rows


def _row(model: Any, strategy: Strategy | None, tokens: int, batch: int, steps: int) -> Row:
    config, some = model.config, next(model.parameters())
    heads, dim = config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention.detach(model)
    cache: Any = DynamicCache(config=config) if strategy is None else KVCache(model, strategy)
    with torch.inference_mode():
        for layer in range(config.num_hidden_layers):
            filled = [torch.randn(batch, heads, tokens, dim, dtype=some.dtype, device=some.device) for _ in range(2)]
            if isinstance(cache, KVCache):
                cache.layers[layer].take_in(*filled)
            else:
                cache.update(*filled, layer)
    token = torch.ones((batch, 1), dtype=torch.int64, device=some.device)
    times = []
    for _ in range(steps + 3):
        start = time.perf_counter()
        forward(model, token, cache, last=True)
        if some.is_cuda:
            torch.cuda.synchronize(some.device)
        times.append(time.perf_counter() - start)
    step = statistics.median(times[3:])
    row: Row = {"name": "DynamicCache" if strategy is None else str(strategy), "tokens": tokens, "batch": batch, "step": step}
    if isinstance(cache, KVCache):
        row["bytes"] = cache.memory().allocated
        if some.is_cuda:
            row |= _captured(model, token, cache)
    else:
        row["bytes"] = 2 * config.num_hidden_layers * batch * heads * tokens * dim * some.dtype.itemsize
    return row | {"tokens_per_second": batch / (row.get("captured") or step)}


def _captured(model: Any, token: Tensor, cache: KVCache, replays: int = 10) -> Row:
    """One more step, recorded as a CUDA graph and replayed; the cache is of no use afterwards."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(model, token, cache, last=True)
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
    except Exception as error:  # something in the step waits for the GPU
        torch.cuda.synchronize()
        return {"captured": None, "why": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"captured": statistics.median(times)}


STRATEGIES = [
    Strategy(),
    Strategy(store=store.Int(bits=8)),
    Strategy(store=store.Int(bits=4)),
    Strategy(store=store.Int(bits=2)),
    Strategy(store=store.Fp8()),
    Strategy(store=store.PreRope(store.Int(bits=4))),
    Strategy(keep.Window(size=4096, sinks=4)),
]
POINTS = ((32768, 16), (131072, 1), (8192, 1), (32768, 1))
"""Tokens and rows of the batch; the first is the figure to reach (int4 against full), the second BitDecoding's (arXiv 2503.18773) case."""


def llama_8b(device: str) -> LlamaForCausalLM:
    """Llama-3.1-8B's shape with random weights in bfloat16: 16 GB."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, max_position_embeddings=131072 + 64,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def main(out: str, budget: float = 150.0) -> None:
    """Every point and strategy that ``budget`` seconds leave time for; what was measured so far is in the file at any time."""
    if not torch.cuda.is_available():
        raise SystemExit("whole_model needs a CUDA device")
    begun, path = time.monotonic(), Path(out)
    model = llama_8b("cuda")
    report: dict[str, Any] = {
        "shape": "Llama-3.1-8B, random weights, bfloat16",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "command": "python -m kvlab.measure.whole_model FILE",
        "rows": [],
        "skipped": [],
    }
    for tokens, batch in POINTS:
        for strategy in (None, *STRATEGIES):
            name = "DynamicCache" if strategy is None else str(strategy)
            if time.monotonic() - begun > budget:
                report["skipped"].append([name, tokens, batch])
                continue
            try:
                row = _row(model, strategy, tokens, batch, 8)
            except Exception as error:
                row = {"name": name, "tokens": tokens, "batch": batch, "failed": f"{type(error).__name__}: {str(error)[:500]}"}
            torch.cuda.empty_cache()
            report["rows"].append(row)
            print(row, flush=True)
            path.write_text(json.dumps(report, indent=1))
    path.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
