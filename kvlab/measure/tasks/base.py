"""What a task is: texts that are read through a cache, and questions asked afterwards, each with the answer that must come."""

from __future__ import annotations

import dataclasses
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvlab.cache import KVCache
from kvlab.lab import Lab, Progress
from kvlab.measure.phases import Phases, phases
from kvlab.memory import Memory
from kvlab.strategy import Strategy
from kvlab.texts import long_text

TASKS: dict[str, type[Task]] = {}
NAMES = ("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry")


@dataclass(frozen=True)
class Question:
    """Asked by continuation: the model goes on after ``text``, and ``answer`` is what it should begin with."""

    text: str
    answer: str


@dataclass(frozen=True)
class Case:
    """One text and the questions on it, asked one after the other through the same cache. The text is read before anything is asked."""

    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Answer:
    expected: str
    said: str

    @property
    def right(self) -> bool:
        return self.said.strip().lower().startswith(self.expected.strip().lower())


@dataclass(frozen=True)
class Score:
    """How a task went. ``value``: 0 to 1, for questions the share of right answers; None: a task without a score. ``memory``: of the last text's cache when it had been read and nothing
    asked yet. ``more``: further numbers by name. ``spent``: seconds by what was done with the cache.
    """

    value: float | None
    memory: Memory
    answers: tuple[Answer, ...] = ()
    more: dict[str, float] = field(default_factory=dict)
    spent: Phases = field(default_factory=Phases)


@dataclass(frozen=True)
class Task(ABC):
    """Settings of a task; plain data. A subclass gives :meth:`cases`, or another :meth:`run` where there are no questions.

    ``least``: what the full cache must reach, or the task says nothing about this model. ``seed``: which texts. ``timed``: how
    long it takes is what it measures, so each prompt passes the model every time.
    """

    title: ClassVar[str] = ""
    least: ClassVar[float] = 0.75
    timed: ClassVar[bool] = False
    seed: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TASKS[cls.__name__] = cls

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ``ValueError`` for settings that cannot be."""

    def within(self, **bounds: tuple[int, int]) -> None:
        """Raise ``ValueError`` for a setting that is no whole number in its bounds."""
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{type(self).__name__}: {name}={value!r} is out of range (allowed: {low} to {high})")

    @abstractmethod
    def cases(self, lab: Lab) -> Iterator[Case]: ...

    def run(self, lab: Lab, strategy: Strategy | None = None, *, progress: Progress | None = None) -> Score:
        """Ask every question through ``strategy`` (the full cache where None). Raises ``ValueError`` where a text does not fit the model's context."""
        answers: list[Answer] = []
        memory = None
        with phases() as spent:
            for number, case in enumerate(self.cases(lab)):
                if progress:
                    progress(self.title or type(self).__name__, number, 0)
                said, memory = ask(lab, strategy, case)
                answers += said
        if memory is None:
            raise ValueError(f"{type(self).__name__}: no text to ask about")
        return Score(sum(answer.right for answer in answers) / len(answers), memory, tuple(answers), spent=spent)

    def to_dict(self) -> dict[str, Any]:
        """Plain data; :func:`from_dict` takes it back."""
        return {"task": type(self).__name__, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(changed)})"


def from_dict(data: dict[str, Any]) -> Task:
    """A task from what :meth:`Task.to_dict` gave. Raises ``ValueError`` for a name or setting that is not known."""
    settings = dict(data)
    name = settings.pop("task", None)
    if name not in TASKS:
        raise ValueError(f"task={name!r} is not one of {', '.join(sorted(TASKS))}")
    known = {f.name for f in dataclasses.fields(TASKS[name])}
    if set(settings) - known:
        raise ValueError(f"{name}: unknown {sorted(set(settings) - known)} (allowed: {', '.join(sorted(known))})")
    return TASKS[name](**settings)


def ask(lab: Lab, strategy: Strategy | None, case: Case) -> tuple[list[Answer], Memory]:
    """Read the case's text, then ask its questions in turn -> the answers, and the cache's bytes before the first question."""
    ids = lab.encode(case.context)
    cache = KVCache(lab.model, strategy)
    try:
        lab.prefill(ids, cache, cache.strategy.chunk)
        cache.read.extend(ids[0].tolist())
        memory, answers = cache.memory(), []
        for question in case.questions:
            room = len(lab.tokenizer.encode(" " + question.answer)) + 1
            said = lab.generate(question.text, cache=cache, max_new_tokens=room).text
            answers.append(Answer(question.answer, said))
    finally:
        cache.close()
    return answers, memory


class Hay:
    """Text to hide things in: the Python reference, or a file of the user's; a different stretch for every number.

    Raises ``ValueError`` for a file that is not there or has too little text.
    """

    def __init__(self, lab: Lab, tokens: int, count: int, file: str = "") -> None:
        if file and not Path(file).is_file():
            raise ValueError(f"file={file!r} is not there (allowed: a text file in UTF-8, or '' for the Python reference)")
        text = Path(file).read_text(encoding="utf-8") if file else long_text()
        if tokens > lab.context - 64:
            raise ValueError(f"tokens={tokens} is more than the model has room for (allowed: up to {lab.context - 64})")
        self.lab, self.tokens = lab, tokens
        stretch = 5 * tokens  # characters; a token of English has four or more
        most = len(text) // stretch
        if count > most:
            raise ValueError(f"texts={count} of {tokens} tokens need more text than there is (allowed: {most})")
        self.pieces = [text[stretch * i : stretch * (i + 1)] for i in range(most)]

    def text(self, number: int, facts: list[tuple[float, str]]) -> str:
        """Stretch ``number`` with ``facts`` put in, each at its depth (0 the start, 1 the end), so that all together has ``tokens`` tokens or a few less."""
        encode, decode = self.lab.tokenizer.encode, self.lab.tokenizer.decode
        room = self.tokens - sum(len(encode(fact)) for _, fact in facts)
        if room < 16:
            raise ValueError(f"tokens={self.tokens} has no room for what is hidden (allowed: {self.tokens - room + 16} or more)")
        hay = encode(self.pieces[number % len(self.pieces)])[:room]
        parts, begin = [], 0
        for depth, fact in sorted(facts):
            at = int(depth * len(hay))
            parts += [decode(hay[begin:at]), fact]
            begin = at
        return "".join([*parts, decode(hay[begin:])])


def chance(task: Task) -> random.Random:
    """The dice of a task: the same for the same settings."""
    return random.Random(str(sorted(task.to_dict().items())))


def key(dice: random.Random) -> str:
    return str(dice.randint(10000, 99999))
