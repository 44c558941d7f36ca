"""Copying: a list of words comes a second time; how does it go on? What induction heads do, and evicted tokens undo."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.lab import Lab
from kvlab.measure.tasks.base import Case, Question, Task, chance

WORDS = (
    "apple", "river", "stone", "candle", "window", "garden", "silver", "mountain", "paper", "bridge", "orange", "winter", "market", "dragon",
    "yellow", "kitchen", "pencil", "forest", "engine", "summer", "bottle", "castle", "planet", "butter", "ladder", "violin", "doctor", "basket",
    "tunnel", "rocket", "island", "carpet", "spider", "mirror", "hammer", "pillow", "lemon", "tiger", "anchor", "button", "camera", "desert",
    "feather", "guitar", "helmet", "jacket", "kettle", "lantern", "magnet", "needle", "oyster", "parrot", "quilt", "ribbon", "saddle", "turtle",
    "umbrella", "valley", "walnut", "zebra",
)  # fmt: skip


@dataclass(frozen=True)
class Copying(Task):
    """``words`` different words in chance order. Then four of them again: the next one must come. ``asked``: from how many places of each list."""

    title = "copying"

    words: int = 48
    texts: int = 2
    asked: int = 4

    def check(self) -> None:
        self.within(words=(8, len(WORDS)), texts=(1, 1000), asked=(1, self.words - 5 if isinstance(self.words, int) else 1))

    def cases(self, lab: Lab) -> Iterator[Case]:
        dice = chance(self)
        for _ in range(self.texts):
            words = dice.sample(WORDS, self.words)
            places = sorted(dice.sample(range(self.words - 4), self.asked))
            questions = [Question(" " + "".join(f"{word}, " for word in words[i : i + 4]).rstrip(), words[i + 4]) for i in places]
            yield Case("A list of words: " + ", ".join(words) + ".", tuple(questions))
