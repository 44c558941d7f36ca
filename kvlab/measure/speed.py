"""What a cache saves: the time of one more token with it and without, at several lengths of context, and the cold first run.

Without a cache every step feeds the whole text again. Both ways are timed in turn within one process, and only medians count; the
first runs, where libraries and memory wake up, stand apart. Times in seconds.
"""

from __future__ import annotations

import datetime
import inspect
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlab import _data
from kvlab.cache import KVCache, forward
from kvlab.lab import Lab, Progress
from kvlab.measure.machine import machine
from kvlab.texts import reference_text

LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # tokens; what `record` measures, about four minutes on two quiet cores
FIRST_RUNS = 4  # runs of the shortest text that are shown apart
RECORDED = "results/speed.jsonl"  # in the data folder


@dataclass(frozen=True)
class Row:
    """One length of context. Medians over ``runs`` runs of ``new_tokens`` tokens each.

    ``without``: seconds for one more token when everything is computed again. ``cached``: for one more token with a cache.
    ``prefill``: to the first token with a cache, all of the ``context`` tokens read at once.
    """

    context: int
    new_tokens: int
    runs: int
    without: float
    cached: float
    prefill: float

    @property
    def ratio(self) -> float:
        """How many times sooner one more token is there with a cache."""
        return self.without / self.cached

    @property
    def read(self) -> float:
        """Prefill, seconds for each token read."""
        return self.prefill / self.context

    def answer(self, tokens: int) -> float:
        """How many times sooner a whole answer of ``tokens`` tokens is there, prefill included; predicted from the medians."""
        if tokens < 1:
            raise ValueError(f"tokens={tokens} is out of range (allowed: 1 or more)")
        return tokens * self.without / (self.prefill + (tokens - 1) * self.cached)


@dataclass(frozen=True)
class First:
    """The same short run several times over: seconds to the first token. ``cold``: nothing was generated on this model before."""

    context: int
    times: tuple[float, ...]
    cold: bool

    @property
    def later(self) -> float:
        """Median of all runs but the first."""
        return statistics.median(self.times[1:])


@dataclass(frozen=True)
class Speed:
    """Rows by rising context, the first runs, and what they were measured on."""

    rows: tuple[Row, ...]
    first: First
    model: str
    device: str
    dtype: str
    machine: dict[str, Any]
    date: str
    command: str = ""

    @property
    def where(self) -> str:
        """Model, device and date in a few words."""
        threads = self.machine["threads"]
        processor = f"{self.machine['processor']}, {threads} thread{'s' if threads > 1 else ''}"
        chip = processor if self.device == "cpu" else self.machine["gpu"]
        return f"{self.model} in {self.dtype} on {self.device} ({chip}), {self.date}"


def crossing(rows: Sequence[Row], times: float) -> float | None:
    """The context (tokens) at which the ratio passes ``times``, between two rows on logarithmic axes; None if it does not."""
    for low, high in pairwise(rows):
        if low.ratio < times <= high.ratio:
            share = math.log(times / low.ratio) / math.log(high.ratio / low.ratio)
            return float(low.context * (high.context / low.context) ** share)
    return None


def first_runs(lab: Lab, prompt: str | Tensor, runs: int = FIRST_RUNS) -> First:
    """Read the prompt ``runs`` times, each with a new cache, and note when the first token is there.

    :func:`kvlab.load` has tried the model with two tokens, which wakes most of it; a wholly cold first run needs a model that was
    loaded and left alone: ``Lab(name, *load_model(name))``. Raises ``ValueError`` for fewer than 2 runs.
    """
    if runs < 2:
        raise ValueError(f"runs={runs} is out of range (allowed: 2 or more)")
    made = [lab.generate(prompt, max_new_tokens=1) for _ in range(runs)]
    return First(made[0].prompt_tokens, tuple(one.first_token_time for one in made), made[0].cold)


def cache_speed(
    lab: Lab,
    lengths: Sequence[int] = (32, 128, 512),
    new_tokens: int = 4,
    *,
    runs: int = 3,
    ids: Tensor | None = None,
    command: str = "",
    progress: Progress | None = None,
    arrived: Callable[[Speed], None] | None = None,
) -> Speed:
    """Generate ``new_tokens`` tokens greedily after each of ``lengths`` tokens of text, with a cache and without one, in turn.

    Args:
        lengths: tokens of context; repeated ones count once.
        new_tokens: tokens a run generates; with a cache the first of them is prefill and the others are timed.
        runs: rounds over all lengths, after the first runs that do not count.
        ids: the text, int64 ``[1, n]``; the reference text where None.
        command: what made this measurement, noted with it.
        progress: called between steps, never within a timed one; counted in tokens that the model reads.
        arrived: called whenever a length has been measured, with the medians so far.

    Raises:
        ValueError: no length or one out of range, fewer than 2 new tokens, no run, a text that is too short.
    """
    chosen = _checked(lab, lengths, new_tokens, runs)
    text = _text(lab, chosen[-1], ids)
    total, done = runs * sum(n * (new_tokens + 1) + new_tokens - 1 for n in chosen), 0
    if progress:
        progress("first runs", 0, total)
    first = first_runs(lab, text[:, : chosen[0]])
    device, dtype = lab.device, next(lab.model.parameters()).dtype
    taken: dict[int, tuple[list[float], list[float], list[float]]] = {n: ([], [], []) for n in chosen}

    def told(stage: str, tokens: int) -> None:
        nonlocal done
        if progress:
            progress(f"{stage}, {n:,} tokens", done, total)
        done += tokens

    def speed() -> Speed:
        rows = tuple(
            Row(n, new_tokens, len(prefill), *map(statistics.median, (without, cached, prefill)))
            for n, (without, cached, prefill) in taken.items()
            if without
        )
        day = datetime.date.today().isoformat()
        return Speed(rows, first, lab.name, str(device), str(dtype).removeprefix("torch."), machine(), day, command)

    for _ in range(runs):
        for n in chosen:
            without, cached, prefill = taken[n]
            start, *steps = _with(lab, text[:, :n], new_tokens, told)
            prefill.append(start)
            cached += steps
            without += _without(lab, text[:, :n], new_tokens, told)
            if arrived:
                arrived(speed())
    return speed()


def record(
    path: str | Path,
    lab: Lab,
    lengths: Sequence[int] = LENGTHS,
    new_tokens: int = 4,
    *,
    runs: int = 3,
    command: str = "kvlab bench speed",
    progress: Progress | None = None,
) -> Speed:
    """:func:`cache_speed`, written to a JSON-lines file in place of what was there; for the first runs see :func:`first_runs`.

    One line for the first runs and one for each length; each carries model, machine, date and command. The file is whole or not
    there. Raises ``ValueError`` as :func:`cache_speed`, ``OSError`` where the file cannot be written.
    """
    made = cache_speed(lab, lengths, new_tokens, runs=runs, command=command, progress=progress)
    common = {key: value for key, value in asdict(made).items() if key not in ("rows", "first")}
    times = [round(seconds, 6) for seconds in made.first.times]
    lines = [{"what": "first", **asdict(made.first), "times": times, **common}]
    for row in made.rows:
        seconds = {name: round(getattr(row, name), 6) for name in ("without", "cached", "prefill")}
        lines.append({"what": "row", **asdict(row), **seconds, "ratio": round(row.ratio, 2), **common})
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return made


def read(path: str | Path | None = None) -> Speed:
    """What :func:`record` wrote; the recording that comes with kvlab where ``path`` is None.

    Raises ``FileNotFoundError``, or ``ValueError`` that names the line which is no recording.
    """
    path = _data.path(RECORDED) if path is None else Path(path)
    rows, first, common = [], None, {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(line)
            common = {key: values[key] for key in ("model", "device", "dtype", "machine", "date", "command")}
            if values["what"] == "first":
                first = First(values["context"], tuple(values["times"]), values["cold"])
            else:
                rows.append(Row(**{key: values[key] for key in Row.__dataclass_fields__}))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number} is no row of a speed recording: {error!r}") from error
    if first is None or not rows:
        raise ValueError(f"{path}: a speed recording has a line for the first runs and one for each length; this one has not")
    return Speed(tuple(rows), first, **common)


def _checked(lab: Lab, lengths: Sequence[int], new_tokens: int, runs: int) -> list[int]:
    if not 2 <= new_tokens < lab.context:
        raise ValueError(f"new_tokens={new_tokens} is out of range (allowed: 2 to {lab.context - 1})")
    if runs < 1:
        raise ValueError(f"runs={runs} is out of range (allowed: 1 or more)")
    longest = lab.context - new_tokens
    if not lengths or not all(1 <= n <= longest for n in lengths):
        raise ValueError(f"lengths={tuple(lengths)} are out of range (allowed: one or more, each from 1 to {longest} tokens)")
    return sorted(set(lengths))


def _text(lab: Lab, longest: int, ids: Tensor | None) -> Tensor:
    if ids is None:
        ids = lab.tokenizer(reference_text()[: 12 * longest], return_tensors="pt", verbose=False).input_ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < longest:
        raise ValueError(f"the text has the shape {tuple(ids.shape)} (allowed: [1, n] with n of {longest} tokens or more)")
    return ids[:, :longest].to(lab.device)


def _with(lab: Lab, ids: Tensor, new_tokens: int, told: Callable[[str, int], None]) -> list[float]:
    """Seconds of each token, with a cache: the first is prefill."""
    cache, times = KVCache(lab.model), []
    for _ in range(new_tokens):
        told("with a cache", ids.shape[1])
        start = time.perf_counter()
        logits = forward(lab.model, ids, cache, last=True)
        ids = logits[:, -1].argmax(-1, keepdim=True)
        int(ids)  # on a GPU: wait until it is there
        times.append(time.perf_counter() - start)
    return times


def _without(lab: Lab, ids: Tensor, new_tokens: int, told: Callable[[str, int], None]) -> list[float]:
    """Seconds of each token when the whole text is read again for it."""
    extra = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(lab.model).forward).parameters else {}
    context, times = ids.shape[1], []
    for _ in range(new_tokens):
        told("without a cache", context)
        start = time.perf_counter()
        with torch.inference_mode():
            logits = lab.model(input_ids=ids, use_cache=False, **extra).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
        int(ids[0, -1])
        times.append(time.perf_counter() - start)
    return times
