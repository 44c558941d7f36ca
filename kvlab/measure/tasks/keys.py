"""Pass keys hidden in a text: one, several, and a second question that nobody saw coming."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from kvlab.cache import KVCache
from kvlab.lab import Lab, Progress
from kvlab.measure.tasks.base import NAMES, Case, Hay, Question, Task, chance, key
from kvlab.memory import Memory
from kvlab.strategy import Strategy
from kvlab.texts import reference_text


@dataclass(frozen=True)
class Needle:
    """One pass key hidden in a text. ``found``: the continuation begins with the key."""

    key: str
    depth: float
    tokens: int
    said: str

    @property
    def found(self) -> bool:
        return self.said.strip().startswith(self.key)


def needle(
    lab: Lab,
    strategy: Strategy | None = None,
    *,
    tokens: int = 512,
    depth: float = 0.5,
    seed: int = 0,
    progress: Progress | None = None,
) -> Needle:
    """Hide a five-digit pass key at ``depth`` (0 the start, 1 the end) of ``tokens`` tokens of reference text, and ask by continuation.

    The question comes last and after the text was read, so a cache must have kept the key without knowing that it matters.

    Raises ``ValueError``: depth outside 0 to 1, or fewer tokens than the needle itself needs (64).
    """
    if not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth={depth} is out of range (allowed: 0.0 to 1.0)")
    if not 64 <= tokens <= lab.context - 16:
        raise ValueError(f"tokens={tokens} is out of range (allowed: 64 to {lab.context - 16})")
    key = str(random.Random(seed).randint(10000, 99999))
    fact, question = f" The secret pass key for Alice is {key}. Remember it. ", "\n\nThe secret pass key for Alice is"
    encode = lab.tokenizer.encode
    room = tokens - len(encode(fact)) - len(encode(question))
    hay = encode(reference_text()[: 12 * tokens])[:room]
    at = int(depth * len(hay))
    context = lab.tokenizer.decode(hay[:at]) + fact + lab.tokenizer.decode(hay[at:])
    ids = lab.encode(context)
    cache = KVCache(lab.model, strategy)
    lab.prefill(ids, cache, cache.strategy.chunk, progress)
    cache.read.extend(ids[0].tolist())
    said = lab.generate(question, cache=cache, max_new_tokens=8, progress=progress)
    return Needle(key, depth, cache.get_seq_length(), said.text)


def _alike(one: str, other: str) -> str:
    """What both begin with."""
    return next((one[:i] for i in range(len(one), 0, -1) if other.startswith(one[:i])), "")


@dataclass(frozen=True)
class PassKeys(Task):
    """``keys`` pass keys of as many people at chance depths of a text of ``tokens`` tokens; one of them is asked for. With one key the classic needle; with
    more, RULER's multi-key needle (arXiv 2404.06654): the others must not be said.
    """

    title = "pass keys"

    tokens: int = 512
    keys: int = 1
    texts: int = 6
    file: str = ""

    def check(self) -> None:
        self.within(tokens=(96, 1 << 20), keys=(1, len(NAMES)), texts=(1, 1000))

    def cases(self, lab: Lab) -> Iterator[Case]:
        dice, hay = chance(self), Hay(lab, self.tokens, self.texts, self.file)
        for number in range(self.texts):
            people, depths = (
                dice.sample(NAMES, self.keys),
                [(number + dice.random()) / self.texts],
            )  # the depths asked for cover the text
            depths += [dice.random() for _ in people[1:]]
            own = [key(dice) for _ in people]
            facts = [
                (depth, f" The secret pass key for {name} is {one}. Remember it. ")
                for depth, name, one in zip(depths, people, own, strict=True)
            ]
            yield Case(hay.text(number, facts), (Question(f"\n\nThe secret pass key for {people[0]} is", own[0]),))


@dataclass(frozen=True)
class TwoKeys(Task):
    """Two pass keys in a text, both asked for, one after the other: a cache that was told what the first question would be has no such help at the second."""

    title = "two keys"

    tokens: int = 512
    texts: int = 4
    file: str = ""

    def check(self) -> None:
        self.within(tokens=(128, 1 << 20), texts=(1, 1000))

    def cases(self, lab: Lab) -> Iterator[Case]:
        dice, hay = chance(self), Hay(lab, self.tokens, self.texts, self.file)
        for number in range(self.texts):
            people, own = dice.sample(NAMES, 2), [key(dice), key(dice)]
            facts = [
                (depth, f" The secret pass key for {name} is {one}. Remember it. ")
                for depth, name, one in zip((0.2, 0.6), people, own, strict=True)
            ]
            yield Case(
                hay.text(number, facts),
                tuple(Question(f"\n\nThe secret pass key for {name} is", one) for name, one in zip(people, own, strict=True)),
            )


@dataclass(frozen=True)
class AskedTwice:
    """Two pass keys in one text, asked for one after the other, in several texts. ``first``, ``second``: whether each text's question was answered.

    ``keys``: what should have been said, ``said``: what was said to each question. ``memory``: of the last text's cache when the text was read and nothing asked yet.
    """

    first: tuple[bool, ...]
    second: tuple[bool, ...]
    keys: tuple[tuple[str, str], ...]
    said: tuple[tuple[str, str], ...]
    memory: Memory

    @property
    def found(self) -> int:
        return sum(self.first) + sum(self.second)

    def digits(self, question: int) -> float:
        """The share of each key's digits, from the first on, that the answers to ``question`` (0 or 1) begin with, on average."""
        if question not in (0, 1):
            raise ValueError(f"question={question} is not one of 0, 1")
        right = [len(_alike(keys[question], said[question].strip())) for keys, said in zip(self.keys, self.said, strict=True)]
        return sum(right) / sum(len(keys[question]) for keys in self.keys)

    @property
    def asked(self) -> int:
        return len(self.first) + len(self.second)


def two_keys(
    lab: Lab,
    strategy: Strategy | None = None,
    *,
    tokens: int = 512,
    texts: int = 8,
    seed: int = 0,
    aware: bool = False,
    progress: Progress | None = None,
) -> AskedTwice:
    """Hide the pass keys of two people in a text of ``tokens`` tokens, a fifth and three fifths in, and ask for the first and then the second.

    The text is read before anything is asked; ``aware`` reads the first question in one piece with the text, which tells a cache that judges by the
    last queries what to keep, and leaves the second question as the honest one. ``texts``: how many texts, each from another place of the reference text
    with other people and keys.

    Raises ``ValueError``: fewer than 128 tokens or more than the model's context, fewer than 1 text, or more than the reference text has.
    """
    if not 128 <= tokens <= lab.context - 64:
        raise ValueError(f"tokens={tokens} is out of range (allowed: 128 to {lab.context - 64})")
    if aware and strategy is not None and strategy.chunk:
        raise ValueError(
            f"two_keys: aware=True reads text and question in one piece, and chunk={strategy.chunk} would not (allowed: 0)"
        )
    encode, chance = lab.tokenizer.encode, random.Random(f"two keys {seed}")
    room = tokens - 64
    most = len(reference_text()) // (6 * room)
    if not 1 <= texts <= most:
        raise ValueError(f"texts={texts} is out of range (allowed: 1 to {most} of {tokens} tokens each)")
    found: tuple[list[bool], list[bool]] = ([], [])
    wanted: list[tuple[str, str]] = []
    said: list[tuple[str, str]] = []
    places = chance.sample(range(most), texts)
    for number, place in enumerate(places):
        names, keys = chance.sample(NAMES, 2), [str(chance.randint(10000, 99999)) for _ in range(2)]
        facts = [f" The secret pass key for {name} is {key}. Remember it. " for name, key in zip(names, keys, strict=True)]
        hay = encode(reference_text()[6 * room * place :][: 12 * room])[:room]
        cut = (room // 5, 3 * room // 5)
        pieces = [lab.tokenizer.decode(part) for part in (hay[: cut[0]], hay[cut[0] : cut[1]], hay[cut[1] :])]
        text = pieces[0] + facts[0] + pieces[1] + facts[1] + pieces[2]
        questions = [f"\n\nThe secret pass key for {name} is" for name in names]
        cache = KVCache(lab.model, strategy)
        step = (lambda stage, done, total: progress(f"two keys, text {number + 1} of {texts}", done, total)) if progress else None  # noqa: B023
        ids = lab.encode(text + questions[0] if aware else text)
        if aware:
            made = [lab.generate(ids, cache=cache, max_new_tokens=8, progress=step)]
            memory = made[0].growth[0][1]
        else:
            lab.prefill(ids, cache, cache.strategy.chunk, step)
            cache.read.extend(ids[0].tolist())
            memory = cache.memory()
            made = [lab.generate(questions[0], cache=cache, max_new_tokens=8, progress=step)]
        made.append(lab.generate(questions[1], cache=cache, max_new_tokens=8, progress=step))
        cache.close()
        for right, own, one in zip(found, keys, made, strict=True):
            right.append(one.text.strip().startswith(own))
        wanted.append((keys[0], keys[1]))
        said.append((made[0].text, made[1].text))
    return AskedTwice(tuple(found[0]), tuple(found[1]), tuple(wanted), tuple(said), memory)
