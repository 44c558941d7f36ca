"""One row of evidence: a strategy, a model, what it cost and what it broke, and the machine and versions beside it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvlab.lab import Lab, Progress
from kvlab.measure.latency import latency
from kvlab.measure.quality import REFERENCE, Control, control, quality
from kvlab.measure.tasks import needle
from kvlab.strategy import Strategy
from kvlab.texts import reference_text


@dataclass(frozen=True)
class Result:
    """Bytes of the cache after the scored text; times in seconds; loss figures against the full cache on the same text."""

    strategy: str
    settings: dict[str, Any]
    model: str
    text: str
    prefill: int
    scored: int
    step: int
    bytes_allocated: int
    bytes_logical: int
    bytes_high_water: int
    ratio: float
    effective_bits: float
    parts: dict[str, int]
    devices: dict[str, int]
    perplexity: float
    full_perplexity: float
    perplexity_change: float
    kl: float
    agreement: float
    needles_found: int
    needles: int
    first_token: float | None
    per_token: float | None
    per_token_p95: float | None
    device: str
    dtype: str
    machine: dict[str, Any]
    date: str
    command: str

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)


def run(
    lab: Lab,
    strategy: Strategy,
    *,
    text: str | None = None,
    protocol: tuple[int, int, int] = REFERENCE,
    against: Control | None = None,
    depths: tuple[float, ...] = (0.1, 0.5, 0.9),
    times: bool = True,
    command: str = "",
    progress: Progress | None = None,
) -> Result:
    """Measure one strategy by the reference protocol: prefill, then the text teacher-forced through the cache, needles, times.

    ``protocol``: tokens of prefill, tokens scored, tokens a step. ``against``: the control of the same text, made anew where None.
    Raises ``ValueError`` where the text has too few tokens for the protocol.
    """
    prefill, scored, step = protocol
    if against is None:
        ids = lab.encode(text) if text is not None else lab.encode(reference_text()[: 8 * (prefill + scored)])
        if ids.shape[1] < prefill + scored:
            raise ValueError(f"the text has {ids.shape[1]} tokens (allowed: {prefill + scored} or more for this protocol)")
        against = control(lab, ids[:, : prefill + scored], prefill=prefill, step=step, progress=progress)
    own = quality(lab, strategy, against, progress=progress)
    found = [needle(lab, strategy, tokens=min(1024, lab.context - 16), depth=d, progress=progress).found for d in depths]
    speed = latency(lab, reference_text()[:2000], strategy, new_tokens=16, runs=2, progress=progress) if times else None
    memory = own.memory
    return Result(
        strategy=str(strategy),
        settings=strategy.to_dict(),
        model=lab.name,
        text="reference text" if text is None else "own text",
        prefill=against.prefill,
        scored=len(own.loss),
        step=against.step,
        bytes_allocated=memory.allocated,
        bytes_logical=memory.logical,
        bytes_high_water=memory.high_water,
        ratio=memory.ratio,
        effective_bits=memory.effective_bits,
        parts=memory.by_part(),
        devices=memory.by_device(),
        perplexity=own.perplexity,
        full_perplexity=own.full_perplexity,
        perplexity_change=own.perplexity_change,
        kl=own.mean_kl,
        agreement=own.agreement,
        needles_found=sum(found),
        needles=len(found),
        first_token=speed.first_token if speed else None,
        per_token=speed.per_token if speed else None,
        per_token_p95=speed.per_token_p95 if speed else None,
        device=str(lab.device),
        dtype=str(next(lab.model.parameters()).dtype).removeprefix("torch."),
        machine=machine(),
        date=datetime.date.today().isoformat(),
        command=command,
    )


def machine() -> dict[str, Any]:
    """Processor, cores, GPU and versions: what a time means nothing without."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": sys.version.split()[0],
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }


def append_jsonl(path: str | Path, results: Iterable[Result]) -> None:
    """Add rows to a JSON-lines file, each line whole or not at all."""
    with open(path, "a", encoding="utf-8") as file:
        for result in results:
            file.write(result.to_json() + "\n")
            file.flush()


def read_jsonl(path: str | Path) -> list[Result]:
    """The rows of a file. Raises ``ValueError`` naming the line that is no result."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(Result(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number} is no result row: {error}") from error
    return rows
