"""Speed: how long a reader waits. No score; its numbers stand beside those of the tasks that have one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.lab import Lab, Progress
from kvlab.measure.latency import summarize
from kvlab.measure.phases import phases
from kvlab.measure.tasks.base import Case, Score, Task
from kvlab.strategy import Strategy
from kvlab.texts import long_text


@dataclass(frozen=True)
class Speed(Task):
    """``tokens`` of prompt, then ``new`` tokens one at a time, ``runs`` times after one run that warms up. ``more``, in seconds: ``first_token`` and
    ``per_token`` (medians), ``first_token_most`` (the slowest run), ``per_token_p95``, and ``cold``, the first token of a process's first run, where this was it.
    """

    title = "speed"
    timed = True

    tokens: int = 512
    new: int = 32
    runs: int = 3

    def check(self) -> None:
        self.within(tokens=(1, 1 << 20), new=(2, 1 << 16), runs=(1, 1000))

    def cases(self, lab: Lab) -> Iterator[Case]:
        return iter(())

    def run(self, lab: Lab, strategy: Strategy | None = None, *, progress: Progress | None = None) -> Score:
        ids = lab.encode_long(long_text()[: 8 * self.tokens])[:, : self.tokens]
        with phases() as spent:
            made = [lab.generate(ids, strategy, max_new_tokens=self.new, progress=progress) for _ in range(self.runs + 1)]
        times = summarize(made[1:])
        more = {
            "first_token": times.first_token,
            "first_token_most": max(one.first_token_time for one in made[1:]),
            "per_token": times.per_token,
            "per_token_p95": times.per_token_p95,
        }
        if made[0].cold:
            more["cold"] = made[0].first_token_time
        return Score(None, made[-1].memory, more=more, spent=spent)
