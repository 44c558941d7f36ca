"""Time to first token and time per token, the cold start apart."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kvlab.lab import Generation, Lab, Progress
from kvlab.strategy import Strategy


@dataclass(frozen=True)
class Latency:
    """Seconds. ``cold``: time to first token of a process's first run, None if that was over before. Medians over the warm runs."""

    first_token: float
    per_token: float
    per_token_p95: float
    cold: float | None
    runs: int


def latency(
    lab: Lab,
    prompt: str,
    strategy: Strategy | None = None,
    *,
    new_tokens: int = 32,
    runs: int = 3,
    progress: Progress | None = None,
) -> Latency:
    """Generate ``new_tokens`` tokens ``runs`` times, after one run that warms up and is not counted.

    Raises ``ValueError``: fewer than 2 new tokens (there would be no time per token) or no run.
    """
    if new_tokens < 2:
        raise ValueError(f"new_tokens={new_tokens} is out of range (allowed: 2 or more)")
    if runs < 1:
        raise ValueError(f"runs={runs} is out of range (allowed: 1 or more)")
    made = [lab.generate(prompt, strategy, max_new_tokens=new_tokens, progress=progress) for _ in range(runs + 1)]
    return summarize(made[1:], made[0].first_token_time if made[0].cold else None)


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
