"""Instruction: what the first turn of a conversation asks for is needed some turns later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.lab import Lab
from kvlab.measure.tasks.base import Case, Hay, Question, Task, chance, key


@dataclass(frozen=True)
class Instruction(Task):
    """Turn 1 says a pass key and asks to remember it; ``turns`` turns of about 80 tokens about something else follow; then it is asked for."""

    title = "an instruction of turn 1"

    turns: int = 4
    texts: int = 4
    file: str = ""

    def check(self) -> None:
        self.within(turns=(1, 100), texts=(1, 1000))

    def cases(self, lab: Lab) -> Iterator[Case]:
        dice, hay = chance(self), Hay(lab, 64, self.texts * self.turns, self.file)
        for number in range(self.texts):
            own = key(dice)
            turns = [f"User: My secret pass key is {own}. Remember it.\n\nAssistant: I will.\n\n"]
            for turn in range(self.turns):
                said = " ".join(hay.text(number * self.turns + turn, []).split())
                turns.append(f"User: Go on.\n\nAssistant: {said}\n\n")
            asked = "User: What is my secret pass key?\n\nAssistant: Your secret pass key is"
            yield Case("".join(turns), (Question(asked, own),))
