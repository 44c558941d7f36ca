"""Variables: a number handed on from name to name, in the manner of RULER (arXiv 2404.06654)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.lab import Lab
from kvlab.measure.tasks.base import NAMES, Case, Hay, Question, Task, chance, key


@dataclass(frozen=True)
class Variables(Task):
    """One person has a pass key, the next has the same as the first, and so on over ``hops`` people, spread through ``tokens`` tokens of text: what is the last one's?

    Where a model cannot do it with the full cache either, the task says nothing about caches, and its rows are refused as evidence.
    """

    title = "variables"

    tokens: int = 512
    hops: int = 2
    texts: int = 4
    file: str = ""

    def check(self) -> None:
        self.within(tokens=(128, 1 << 20), hops=(1, len(NAMES) - 1), texts=(1, 1000))

    def cases(self, lab: Lab) -> Iterator[Case]:
        dice, hay = chance(self), Hay(lab, self.tokens, self.texts, self.file)
        for number in range(self.texts):
            people, own = dice.sample(NAMES, self.hops + 1), key(dice)
            depths = [0.1 + 0.7 * i / self.hops for i in range(self.hops + 1)]
            facts = [(depths[0], f" The secret pass key for {people[0]} is {own}. ")]
            facts += [
                (depth, f" {one} has the same secret pass key as {before}. ")
                for depth, before, one in zip(depths[1:], people, people[1:], strict=False)
            ]
            yield Case(hay.text(number, facts), (Question(f"\n\nThe secret pass key for {people[-1]} is", own),))
