"""Studies of serving, whose rows lie in ``data/results/serving.jsonl``: what blocks save, what batching gains, what sharing beginnings spares, and whether the
simulator's clock is right. Times are of one run on one machine: their ratios mean something.

``python -m kvlab.measure.serving_studies FILE`` times engines on a GPU, on a model of Llama-3.1-8B's shape with random weights, and writes the rows as JSON.
"""

from __future__ import annotations

import datetime
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from kvlab import attention
from kvlab.lab import Lab
from kvlab.measure.machine import machine
from kvlab.serving import Engine, Sampling, Served, run_trace, simulate, traces
from kvlab.serving import engine as paged
from kvlab.serving.clocks import calibrate
from kvlab.serving.simulate import block_bytes
from kvlab.serving.traces import Arrival
from kvlab.strategy import Strategy
from kvlab.texts import reference_text

Row = dict[str, Any]
Say = Callable[[str], None]
store: Any = importlib.import_module("kvlab.store")  # by its names in the registry, which no type checker reads

LIMIT = 2048  # tokens, prompt and answer: what a server must count with
PAGED = {
    "16 bits": Strategy(),
    "8 bits": Strategy(store=store.Int(bits=8)),
    "8 bits, a scale for each token": Strategy(store=store.Int(bits=8, key_axis="token")),
    "fp8": Strategy(store=store.Fp8()),
    "4 bits": Strategy(store=store.Int(bits=4)),
}
ALIKE = {"prefix": 2000, "suffix": 64, "answer": 64}
BLOCK_SIZES = (1, 4, 8, 16, 32, 64, 128)


def paging(lab: Lab, say: Say, requests: int = 400) -> Iterator[Row]:
    """Requests that are all there, with memory for 8 of 2,048 tokens in 16 bits: how many run at once if each reserves the worst case, and if it takes blocks as
    it grows. Counted by the scheduler, a step of the clock for a step of the model; no model runs."""
    trace = traces.chat(requests, rate=1e6, limit=LIMIT)
    room = int(8 * LIMIT / 16 * block_bytes(lab.geometry, Strategy(), 16))
    ways: dict[str, dict[str, Any]] = {"the worst case reserved": {"reserve": "worst"}}
    ways |= {f"blocks, {name}": {"strategy": strategy} for name, strategy in PAGED.items()}
    ways |= {f"blocks of {size}": {"strategy": Strategy(), "block_size": size} for size in BLOCK_SIZES} | {
        f"blocks of {size}, 8 bits": {"strategy": PAGED["8 bits"], "block_size": size} for size in (32, 64)
    }
    for name, how in ways.items():
        made = simulate(
            trace,
            lab.geometry,
            "H100 SXM 80GB",
            kv_memory=room,
            clock=lambda _: 1.0,
            prefix_caching=False,
            max_running=10_000,
            **how,
        )
        row: Row = {"name": name, "bytes": room, **_counts(made), "concurrent": made.concurrent, "waste": made.waste}
        say(f"{name:42} {made.concurrent:6.1f} at once  waste {100 * made.waste:.1f}%  {made.preemptions} preempted")
        yield row


def blocks(lab: Lab, say: Say, requests: int = 8, tokens: int = 256, rounds: int = 20) -> Iterator[Row]:
    """One decode step of 8 requests of 256 tokens at several block sizes, engines in turn within each round; medians."""
    engines = {size: Engine(lab, kv_memory="64 MB", block_size=size, prefix_caching=False) for size in BLOCK_SIZES}
    ids = lab.encode_long(reference_text())[0].tolist()
    for engine in engines.values():
        for number in range(requests):
            start = number * tokens
            engine.add(ids[start : start + tokens], Sampling(max_new_tokens=rounds + 8, ignore_eos=True))
        while engine.metrics().tokens_made < 2 * requests:
            engine.step()
    taken: dict[int, list[float]] = {size: [] for size in engines}
    for _ in range(rounds):
        for size, engine in engines.items():
            begun = time.perf_counter()
            engine.step()
            taken[size].append(time.perf_counter() - begun)
    base = statistics.median(taken[16])
    for size, times in taken.items():
        middle = statistics.median(times)
        say(f"blocks of {size:4} tokens: {1e3 * middle:7.1f} ms a step, {middle / base:.2f} of blocks of 16")
        yield {"name": f"blocks of {size}", "block_size": size, "step": middle, "times": middle / base}


def batching(lab: Lab, say: Say, requests: int = 40) -> Iterator[Row]:
    """The same 40 requests, all there from the start, lengths log-normal: ways to batch them, on the real model, with memory for 8 of 2,048 tokens."""
    trace = traces.chat(requests, rate=1e6, prompt=100, answer=80, limit=LIMIT, words=_words(lab))
    memory: dict[str, Any] = {"kv_memory": int(8 * LIMIT * _token_bytes(lab)), "prefix_caching": False}
    worst = memory | {"reserve": "worst"}
    ways: dict[str, Callable[[], tuple[int, float, Row]]] = {
        "generate(), one by one (10 of them)": lambda: _one_by_one(lab, trace[:10]),
        "generate(), padded batches of 8": lambda: _padded(lab, trace, 8),
        "engine, static batches of 8": lambda: _engine(lab, trace, **worst, batching="static", max_running=8),
        "engine, continuous, worst case reserved": lambda: _engine(lab, trace, **worst),
        "engine, continuous, in blocks": lambda: _engine(lab, trace, **memory),
        "engine, continuous, in blocks of 8 bits": lambda: _engine(lab, trace, strategy=PAGED["8 bits"], **memory),
        "transformers' continuous batching": lambda: _transformers(lab, trace, 8 * LIMIT),
    }
    for name, way in ways.items():
        made, seconds, more = way()
        say(f"{name:44} {made:6} tokens in {seconds:7.1f} s: {made / seconds:6.2f} a second  {more}")
        yield {"name": name, "made": made, "seconds": seconds, "throughput": made / seconds, **more}


def batch8(lab: Lab, say: Say) -> Iterator[Row]:
    """Eight texts, 32 new tokens each: one by one through `generate()`, together through the engine, and through transformers' continuous batching; alternating,
    medians of three. The tokens of the first two are compared."""
    ids = lab.encode_long(reference_text())[0].tolist()
    trace = [Arrival(0.0, tuple(ids[700 * number : 700 * number + 92]), 32) for number in range(8)]
    taken: dict[str, list[float]] = {}
    said: dict[str, Any] = {}
    for _ in range(3):
        for name, way in {
            "generate(), one by one": lambda: _one_by_one(lab, trace),
            "engine, together": lambda: _engine(lab, trace, kv_memory="128 MB"),
            "transformers' continuous batching": lambda: _transformers(lab, trace, 4096),
        }.items():
            made, seconds, more = way()
            said[name] = more.pop("tokens", None)
            taken.setdefault(name, []).append(seconds)
    one = statistics.median(taken["generate(), one by one"])
    same = said["generate(), one by one"] == said["engine, together"]
    for name, times in taken.items():
        middle = statistics.median(times)
        say(f"{name:36} {middle:6.1f} s  {one / middle:.2f} times one by one  same tokens: {same}")
        yield {"name": name, "seconds": middle, "times": one / middle, "made": made, "same_tokens": same}


def prefix(lab: Lab, say: Say, requests: int = 10) -> Iterator[Row]:
    """Requests that begin with the same 2,000 tokens, 64 of their own, 64 new ones, one after the other, shared and not: time to the first token, nobody in the way."""
    some = traces.shared_prompt(requests, **ALIKE, words=_words(lab))
    for name, sharing in (("one after the other, shared", True), ("one after the other, not shared", False)):
        engine = Engine(
            lab, prefix_caching=sharing, kv_memory=int(1.1 * (2000 + 128 * requests) * _token_bytes(lab)), max_running=1
        )
        first = []
        for one in some:
            (moment,) = (
                made.first_token_time for made in engine.generate([one.prompt], Sampling(max_new_tokens=one.new, ignore_eos=True))
            )
            first.append(moment or 0.0)
        found = engine.metrics()
        row: Row = {
            "name": name,
            "requests": len(some),
            "first": first[0],
            "later": statistics.median(first[1:]),
            "computed": found.tokens_computed,
            "prompt_computed": found.tokens_computed - len(some) * 63,
            "hit_rate": found.prefix_hit_rate,
        }
        say(
            f"{name:44} first token {row['first']:.2f} s, later ones {row['later']:.2f} s; {row['prompt_computed']:,} of {found.prompt_tokens:,} prompt tokens computed"
        )
        yield row


def shared(lab: Lab, say: Say, requests: int = 100) -> Iterator[Row]:
    """A hundred such requests at once: on the real model with shared blocks, counted by the scheduler without; and both for a 70B model, simulated."""
    trace = traces.shared_prompt(requests, **ALIKE, words=_words(lab))
    at_once = [Arrival(0.0, one.prompt, one.new) for one in trace]
    engine = Engine(lab, kv_memory=int(1.1 * (2000 + 128 * requests) * _token_bytes(lab)), max_running=requests)
    room = int(1.1 * 2128 * requests / 16 * block_bytes(lab.geometry, Strategy(), 16))
    how: dict[str, Any] = {
        "max_running": requests,
        "token_budget": 2064 * requests,
    }  # all of them read at once, else the first are done before the last begin
    counted = simulate(at_once, lab.geometry, "H100 SXM 80GB", kv_memory=room, prefix_caching=False, clock=lambda _: 1.0, **how)
    real = run_trace(engine, at_once)
    for name, made, whole in (
        ("all at once, shared", real, engine.pool.blocks),
        ("all at once, not shared (counted)", counted, int(room // block_bytes(lab.geometry, Strategy(), 16))),
    ):
        most = round(max(moment.usage for moment in made.moments) * whole)
        own = made.together * 8  # blocks of what is each one's own: 128 tokens
        row = {"name": name, **_counts(made), "most_blocks": most, "prefix_blocks": most - own, "label": made.label}
        say(f"{name:44} {most:,} blocks at most, {most - own:,} of them for the prefix; {made.computed:,} tokens computed")
        yield row
    for name, sharing in (("70B on 8 H100, shared (simulated)", True), ("70B on 8 H100, not shared (simulated)", False)):
        made = simulate(trace, "Llama-3.1-70B", "H100 SXM 80GB", devices=8, prefix_caching=sharing, max_running=requests)
        yield {"name": name, **_counts(made), "first_token": made.first_token, "label": made.label}


def simulator(lab: Lab, say: Say, requests: int = 24) -> Iterator[Row]:
    """A chat trace on the engine in real time, and simulated with a clock that was fitted to other requests on this machine."""
    trace = traces.chat(requests, rate=0.6, prompt=100, answer=50, limit=512, words=_words(lab))
    how: dict[str, Any] = {"prefix_caching": False, "max_running": 8}
    engine = Engine(lab, kv_memory=int(2048 * _token_bytes(lab)), **how)
    clock = calibrate(lab, most=8, tokens=512)
    real = run_trace(engine, trace)
    room = int(engine.pool.blocks * block_bytes(lab.geometry, Strategy(), 16))
    made = simulate(trace, lab.geometry, "H100 SXM 80GB", kv_memory=room, clock=clock, **how)
    for name, one in (("engine", real), ("simulated", made)):
        say(
            f"{name:12} {one.throughput:.2f} tokens a second, {100 * one.kv_usage:.1f}% of the blocks, first token {one.first_token:.2f} s, {one.concurrent:.1f} at once"
        )
        yield {
            "name": name, "throughput": one.throughput, "kv_usage": one.kv_usage, "first_token": one.first_token, "per_token": one.per_token,
            "concurrent": one.concurrent, "label": one.label, **({"clock": vars(clock)} if one is made else {}), **_counts(one),
        }  # fmt: skip


def _counts(made: Served) -> Row:
    return {
        "served": made.served,
        "together": made.together,
        "prompt_tokens": made.prompt_tokens,
        "computed": made.computed,
        "cached": made.cached,
        "made": made.made,
        "preemptions": made.preemptions,
    }


def _words(lab: Lab) -> int:
    return int(lab.model.config.get_text_config(decoder=True).vocab_size)


def _token_bytes(lab: Lab) -> float:
    """Of the cache, as the model holds numbers."""
    return paged.block_bytes(lab, Strategy(), 1)


def _one_by_one(lab: Lab, trace: Sequence[Arrival]) -> tuple[int, float, Row]:
    """transformers' own ``generate()``, a request at a time."""
    attention.detach(lab.model)
    try:
        begun = time.perf_counter()
        tokens = [
            lab.model.generate(
                torch.tensor([one.prompt]), max_new_tokens=one.new, do_sample=False, pad_token_id=0, eos_token_id=None
            )[0, len(one.prompt) :].tolist()
            for one in trace
        ]
        return (
            sum(map(len, tokens)),
            time.perf_counter() - begun,
            {"tokens": tokens} if len(trace) == 8 else {"requests": len(trace)},
        )
    finally:
        attention.attach(lab.model)


def _padded(lab: Lab, trace: Sequence[Arrival], size: int) -> tuple[int, float, Row]:
    """What is asked of `generate()` for a list of texts: shorter ones padded, all of them running until the longest is done."""
    attention.detach(lab.model)
    try:
        begun = time.perf_counter()
        for start in range(0, len(trace), size):
            some = trace[start : start + size]
            longest = max(len(one.prompt) for one in some)
            ids = torch.tensor([[0] * (longest - len(one.prompt)) + list(one.prompt) for one in some])
            there = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in some])
            new = max(one.new for one in some)
            lab.model.generate(ids, attention_mask=there, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
        return sum(one.new for one in trace), time.perf_counter() - begun, {}
    finally:
        attention.attach(lab.model)


def _engine(lab: Lab, trace: Sequence[Arrival], **how: Any) -> tuple[int, float, Row]:
    made = run_trace(Engine(lab, **how), trace)
    more: Row = {"together": made.together, "concurrent": made.concurrent, "waste": made.waste, "preemptions": made.preemptions}
    return made.made, made.seconds, more | ({"tokens": [one.output for one in made.requests]} if len(trace) == 8 else {})


def _transformers(lab: Lab, trace: Sequence[Arrival], tokens: int) -> tuple[int, float, Row]:
    """transformers' own continuous batching, with ``tokens`` tokens of pages."""
    from transformers import ContinuousBatchingConfig

    attention.detach(lab.model)
    before = lab.model.config._attn_implementation
    try:
        config = GenerationConfig(max_new_tokens=LIMIT, do_sample=False, eos_token_id=-1, pad_token_id=0)
        pages = ContinuousBatchingConfig(page_size=256, num_blocks=tokens // 256, max_batch_tokens=512, allow_block_sharing=False)
        with lab.model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=pages) as manager:
            begun, made, done = time.perf_counter(), 0, 0
            for one in trace:
                manager.add_request(list(one.prompt), max_new_tokens=one.new)
            while done < len(trace):
                found = manager.get_result(timeout=1)
                if found is None and not manager.is_running():
                    raise RuntimeError("transformers' continuous batching has ended before its requests")
                if found is not None and found.is_finished():
                    if found.error:
                        raise RuntimeError(f"transformers' continuous batching: {found.error}")
                    done, made = done + 1, made + len(found.generated_tokens)
            seconds = time.perf_counter() - begun
        return made, seconds, {}
    finally:
        lab.model.set_attn_implementation(before)
        attention.attach(lab.model)


def engines(lab: Lab, requests: int, tokens: int, new: int, peer: bool = True) -> Iterator[Row]:
    """``requests`` prompts of ``tokens`` random tokens, all there at the start, ``new`` tokens each: engines with plain blocks and with codes, and transformers' own
    continuous batching; tokens a second of a second run, so that nothing is compiled in it."""
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _words(lab), (requests, tokens), generator=dice).tolist()
    trace = [Arrival(0.0, tuple(row), new) for row in ids]
    room = {
        "kv_memory": int(requests * (tokens + new + 64) * _token_bytes(lab)),
        "max_running": requests,
        "token_budget": 2048,
        "prefix_caching": False,
    }
    for name in ("16 bits", "8 bits, a scale for each token", "4 bits", "fp8"):
        for _ in range(2):
            made, seconds, more = _engine(lab, trace, strategy=PAGED[name], **room)
        yield {
            "name": f"engine, {name}",
            "requests": requests,
            "made": made,
            "seconds": seconds,
            "throughput": made / seconds,
            **more,
        }
    if peer:
        for _ in range(2):
            made, seconds, _ = _transformers(lab, trace, 256 * -(-requests * (tokens + new + 256) // 256))
        yield {
            "name": "transformers' continuous batching",
            "requests": requests,
            "made": made,
            "seconds": seconds,
            "throughput": made / seconds,
        }


def main(out: str) -> None:
    """Write what was measured so far after each row; a way that fails is a row with its reason."""
    from kvlab.measure.whole_model import llama_8b

    if not torch.cuda.is_available():
        raise SystemExit("this measures a CUDA device, and there is none")
    blank: Any = SimpleNamespace(decode=lambda tokens: "", eos_token_id=None)
    lab = Lab("Llama-3.1-8B's shape, random weights", llama_8b("cuda"), blank)
    attention.attach(lab.model)
    report: Row = {
        "device": torch.cuda.get_device_name(), "machine": machine(), "date": datetime.date.today().isoformat(),
        "command": "python -m kvlab.measure.serving_studies FILE", "rows": [],
    }  # fmt: skip
    for requests in (8, 64):
        rows = engines(lab, requests, 1024, 64)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                break
            except Exception as error:
                row = {"requests": requests, "failed": f"{type(error).__name__}: {str(error)[:500]}"}
            report["rows"].append(row)
            print(row, flush=True)
            Path(out).write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
