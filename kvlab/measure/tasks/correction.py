"""Correction: a fact stated early is corrected late, and the newest must be said."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.lab import Lab
from kvlab.measure.tasks.base import NAMES, Case, Hay, Question, Task, chance, key


@dataclass(frozen=True)
class Correction(Task):
    """A pass key a tenth into a text of ``tokens`` tokens, and a new one for the same person at seven tenths. A cache that lost the second says the first."""

    title = "a fact corrected"

    tokens: int = 512
    texts: int = 4
    file: str = ""

    def check(self) -> None:
        self.within(tokens=(128, 1 << 20), texts=(1, 1000))

    def cases(self, lab: Lab) -> Iterator[Case]:
        dice, hay = chance(self), Hay(lab, self.tokens, self.texts, self.file)
        for number in range(self.texts):
            name, old, new = dice.choice(NAMES), key(dice), key(dice)
            facts = [
                (0.1, f" The secret pass key for {name} is {old}. Remember it. "),
                (0.7, f" The secret pass key for {name} is now {new}. Remember it. "),
            ]
            yield Case(hay.text(number, facts), (Question(f"\n\nThe secret pass key for {name} is now", new),))
