"""Side by side: kvlab's strategies and transformers' own caches on one text, one model, in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvlab import attention
from kvlab.cache import KVCache, forward
from kvlab.lab import Lab, Progress
from kvlab.measure.machine import machine
from kvlab.measure.peers import Peer
from kvlab.measure.quality import Control, compared, read
from kvlab.rope import Rope
from kvlab.strategy import Strategy


@dataclass(frozen=True)
class Compared:
    """One contender's run. ``bytes``: of all tensors it holds after the text; ``ratio``: to the same tokens in a dense 16-bit cache.

    ``step``: median seconds of a decode step of the whole model after the text. ``why``: why there are no numbers (they are NaN then).
    """

    name: str
    bytes: float = float("nan")
    ratio: float = float("nan")
    perplexity_change: float = float("nan")
    kl: float = float("nan")
    agreement: float = float("nan")
    step: float = float("nan")
    why: str = ""

    @property
    def effective_bits(self) -> float:
        return 16 * self.ratio


def compare(
    lab: Lab, contenders: Iterable[Strategy | Peer], against: Control, *, steps: int = 16, progress: Progress | None = None
) -> list[Compared]:
    """Read the control's text through each contender, then take ``steps`` decode steps. Raises ``ValueError`` for fewer than 1 step."""
    if steps < 1:
        raise ValueError(f"steps={steps} is out of range (allowed: 1 or more)")
    rows = []
    for contender in contenders:
        name = str(contender) if isinstance(contender, Strategy) else contender.name
        if isinstance(contender, Peer) and contender.missing:
            rows.append(Compared(name, why=contender.missing))
            continue
        try:
            rows.append(_run(lab, name, contender, against, steps, progress))
        except (
            RuntimeError,
            NotImplementedError,
            LookupError,
            AssertionError,
            AttributeError,
            ImportError,
            TypeError,
            ValueError,
        ) as error:
            if isinstance(contender, Strategy):
                raise
            rows.append(Compared(name, why=f"{type(error).__name__}: {error}"))  # what a peer cannot do is said, not left out
        gc.collect()
    return rows


def _run(lab: Lab, name: str, contender: Strategy | Peer, against: Control, steps: int, progress: Progress | None) -> Compared:
    model, tokens = lab.model, against.ids.shape[1]
    attached = isinstance(contender, Strategy)
    if isinstance(contender, Strategy):
        cache: Cache = KVCache(model, contender)
        chunk = contender.chunk
    else:
        attention.detach(model)  # a peer runs with transformers' own attention
        cache, chunk = contender.make(model.config, tokens + steps + 2), 0
    opened = contextlib.nullcontext() if isinstance(contender, Strategy) else contender.around(model)
    try:
        with opened:
            logits = read(lab, against.ids, cache, against.prefill, against.step, chunk=chunk, progress=progress, stage=name)
        held = sum(storages(cache).values())
        loss, full, kl, agree = compared(logits, against)
        times = []
        for _ in range(steps + 2):
            start = time.perf_counter()
            forward(model, against.ids[:, :1], cache, last=True)
            if lab.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    finally:
        if not attached:
            attention.attach(model)
    dense = sum(tokens * layer.kv_heads * (layer.key_dim + layer.value_dim) * 2 for layer in lab.geometry.layers)
    change = float(loss.double().mean().exp() / full.double().mean().exp()) - 1
    return Compared(
        name,
        float(held),
        held / dense,
        change,
        float(kl.double().mean()),
        float(agree.double().mean()),
        statistics.median(times[2:]),
    )


def storages(cache: Cache) -> dict[int, int]:
    """Bytes of every storage that a cache's tensors lie in, by address, each counted once: what it really holds, whoever made it.

    Looks through attributes, mappings, lists and tuples, and into tensors that are made of tensors (quanto's).
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[Any] = [cache]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, nn.Module | type | Rope):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            inner = [getattr(item, name) for name in item.__tensor_flatten__()[0]] if hasattr(item, "__tensor_flatten__") else []
            if inner:
                stack += inner
            else:
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list | tuple | set):
            stack += item
        elif type(item).__module__.split(".")[0] in ("transformers", "kvlab", "hqq", "optimum") and hasattr(item, "__dict__"):
            stack += vars(item).values()
    return found


def record(path: str | Path, rows: Iterable[Compared], lab: Lab, against: Control, command: str) -> None:
    """Add the table to a JSON-lines file, one line a run, with machine, date and command; what there is no number for is null."""
    line = {
        "rows": [
            {k: None if v != v else v for k, v in (dataclasses.asdict(row) | {"effective_bits": row.effective_bits}).items()}
            for row in rows
        ],
        "model": lab.name,
        "prefill": against.prefill,
        "scored": len(against.loss),
        "step": against.step,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "command": command,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
