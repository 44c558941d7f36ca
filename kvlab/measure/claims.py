"""What papers claim beside what this project measured: ten famous claims, each with the recorded rows of the strategy that comes nearest."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvlab import _data
from kvlab.measure.experiment import Evidence, recorded
from kvlab.measure.named import name_of


@dataclass(frozen=True)
class Claimed:
    """``claim`` was made for ``models`` in ``source``. ``strategy`` is the name of what was measured here on ``model``: ``ratio`` of a 16-bit cache, ``kl``
    (nats) and ``perplexity_change`` on the reference text, ``recall``: right answers and questions of the tasks with pass keys. None where it was not measured.
    """

    claim: str
    models: str
    source: str
    strategy: str
    model: str = ""
    ratio: float | None = None
    kl: float | None = None
    perplexity_change: float | None = None
    recall: tuple[int, int] | None = None

    @property
    def measured(self) -> str:
        """In words."""
        if self.ratio is None or self.kl is None or self.perplexity_change is None:
            return "not measured"
        keys = "" if self.recall is None else f", {self.recall[0]} of {self.recall[1]} pass keys"
        return f"{100 * self.ratio:.0f}% of 16-bit, perplexity {100 * self.perplexity_change:+.1f}%, KL {self.kl:.3f}{keys}"


def claims(rows: Iterable[Evidence] | None = None) -> list[Claimed]:
    """The claims of ``data/published.csv`` beside ``rows`` (the recorded evidence where None)."""
    found: dict[str, list[Evidence]] = {}
    for row in recorded() if rows is None else rows:
        if row.counts:
            found.setdefault(name_of(row.settings), []).append(row)
    with _data.path("published.csv").open(encoding="utf-8", newline="") as file:
        return [_beside(line, found.get(line["measured"], [])) for line in csv.DictReader(file)]


def _beside(line: dict[str, str], rows: list[Evidence]) -> Claimed:
    said = (line["claim"], line["model"], line["source"], line["measured"])
    text = next((row for row in rows if row.task["task"] == "Text"), None)
    asked = [row for row in rows if row.questions and row.task["task"] in ("PassKeys", "TwoKeys")]
    if text is None:
        return Claimed(*said)
    recall = (
        (sum(round((row.score or 0.0) * row.questions) for row in asked), sum(row.questions for row in asked)) if asked else None
    )
    return Claimed(*said, text.model, text.ratio, text.more["kl"], text.more["perplexity_change"], recall)


def frame(made: Iterable[Claimed]) -> Any:
    """A pandas ``DataFrame``: claim, for which models, by whom, and what was measured here."""
    import pandas as pd

    columns = ["claimed", "for", "source", "measured here as", "measured"]
    return pd.DataFrame([(one.claim, one.models, one.source, one.strategy, one.measured) for one in made], columns=columns)
