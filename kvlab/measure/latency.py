"""Time to first token and time per token, the cold start apart."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kvlab.lab import Generation


@dataclass(frozen=True)
class Latency:
    """Seconds. ``cold``: time to first token of a process's first run, None if that was over before. Medians over the warm runs."""

    first_token: float
    per_token: float
    per_token_p95: float
    cold: float | None
    runs: int


def summarize(made: list[Generation], cold: float | None = None) -> Latency:
    """The medians of runs already made."""
    times = sorted(t for one in made for t in one.token_times)
    if not times:
        times = [0.0]
    return Latency(
        statistics.median(one.first_token_time for one in made),
        statistics.median(times),
        times[min(len(times) - 1, int(0.95 * len(times)))],
        cold,
        len(made),
    )
