"""Traces: who asks when, for how much, and what the prompts have in common. Seeded, so that two machines see the same requests."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """A request to come: ``time`` in seconds, token ids of its ``prompt``, ``new`` tokens that it will make, up to ``most`` for all that a server knows (0: it
    knows ``new``). ``session``: what a router may go by.
    """

    time: float
    prompt: tuple[int, ...]
    new: int
    session: Hashable = None
    most: int = 0


WORDS = 32_000  # token ids are drawn from so many, unless told otherwise


def chat(
    count: int,
    *,
    rate: float = 2.0,
    prompt: int = 160,
    answer: int = 120,
    limit: int = 2048,
    spread: float = 0.8,
    seed: int = 0,
    words: int = WORDS,
) -> list[Arrival]:
    """``count`` requests by chance (Poisson, ``rate`` a second); lengths log-normal around their medians, prompt and answer together up to ``limit``,
    and no server knows which answer ends before.

    Raises ``ValueError`` for counts, rates or lengths that cannot be.
    """
    _check(count=count, rate=rate, prompt=prompt, answer=answer, words=words, limit=limit)
    if limit < 2:
        raise ValueError(f"limit={limit} is out of range (allowed: 2 or more)")
    if not isinstance(spread, int | float) or not 0 <= spread < 10:
        raise ValueError(f"spread={spread} is out of range (allowed: 0 to 10)")
    dice, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += dice.expovariate(rate)
        length = min(limit - 1, max(1, round(prompt * dice.lognormvariate(0, spread))))
        new = min(limit - length, max(1, round(answer * dice.lognormvariate(0, spread))))
        found.append(Arrival(now, _text(dice, length, words), new, most=limit - length))
    return found


def bursts(count: int, *, size: int = 20, pause: float = 10.0, seed: int = 0, **lengths: int) -> list[Arrival]:
    """As :func:`chat`, but ``size`` at once and then nobody for ``pause`` seconds."""
    _check(count=count, size=size, pause=pause)
    plain = chat(count, seed=seed, **lengths)  # type: ignore[arg-type]
    return [Arrival(number // size * pause, one.prompt, one.new, most=one.most) for number, one in enumerate(plain)]


def shared_prompt(
    count: int,
    *,
    prefix: int = 2000,
    suffix: int = 64,
    answer: int = 64,
    rate: float = 2.0,
    tenants: int = 1,
    seed: int = 0,
    words: int = WORDS,
) -> list[Arrival]:
    """A system prompt of ``prefix`` tokens before ``suffix`` tokens of each one's own; ``tenants``: so many different system prompts, by turns."""
    _check(count=count, prefix=prefix, suffix=suffix, answer=answer, rate=rate, tenants=tenants, words=words)
    dice, now = random.Random(seed), 0.0
    systems = [_text(dice, prefix, words) for _ in range(tenants)]
    found = []
    for number in range(count):
        found.append(Arrival(now, (*systems[number % tenants], *_text(dice, suffix, words)), answer, number % tenants))
        now += dice.expovariate(rate)
    return found


def rag(
    count: int, *, system: int = 200, chunks: int = 4, chunk: int = 250, library: int = 40, question: int = 30, answer: int = 80, ordered: bool = False,
    rate: float = 1.0, seed: int = 0, words: int = WORDS,
) -> list[Arrival]:  # fmt: skip
    """A template: system prompt, ``chunks`` pieces out of a ``library`` (a few of them asked for often), a question. ``ordered``: pieces stand by their number,
    which lets beginnings meet; else by how well they fit, which is another order for every question.
    """
    _check(
        count=count,
        system=system,
        chunks=chunks,
        chunk=chunk,
        library=library,
        question=question,
        answer=answer,
        rate=rate,
        words=words,
    )
    if chunks > library:
        raise ValueError(f"chunks={chunks} is more than the library has (allowed: up to {library})")
    dice, now = random.Random(seed), 0.0
    head, books = _text(dice, system, words), [_text(dice, chunk, words) for _ in range(library)]
    chances = [1 / (1 + number) for number in range(library)]
    found = []
    for _ in range(count):
        chosen: list[int] = []
        while len(chosen) < chunks:
            one = dice.choices(range(library), chances)[0]
            if one not in chosen:
                chosen.append(one)
        parts = [token for number in (sorted(chosen) if ordered else chosen) for token in books[number]]
        found.append(Arrival(now, (*head, *parts, *_text(dice, question, words)), answer))
        now += dice.expovariate(rate)
    return found


def turns(
    users: int,
    *,
    count: int = 5,
    system: int = 100,
    said: int = 40,
    answer: int = 80,
    think: float = 8.0,
    seed: int = 0,
    words: int = WORDS,
) -> list[Arrival]:
    """Conversations of ``count`` turns: each prompt is all that was said before and a little more. ``think``: seconds between an answer and the next turn, on average."""
    _check(users=users, count=count, system=system, said=said, answer=answer, think=think, words=words)
    dice = random.Random(seed)
    head, found = _text(dice, system, words), []
    for user in range(users):
        now, text = dice.uniform(0, think), head
        for _ in range(count):
            text = (*text, *_text(dice, said, words))
            found.append(Arrival(now, text, answer, user))
            text = (*text, *_text(dice, answer, words))
            now += dice.expovariate(1 / think)
    return sorted(found, key=lambda one: one.time)


def tools(
    agents: int, *, calls: int = 8, system: int = 600, result: int = 300, answer: int = 40, seed: int = 0, words: int = WORDS
) -> list[Arrival]:
    """Agents in a loop: a long description of tools, then call after call, each with a result that is long and an answer that is short."""
    _check(agents=agents, calls=calls, system=system, result=result, answer=answer, words=words)
    return turns(agents, count=calls, system=system, said=result, answer=answer, think=1.0, seed=seed, words=words)


def _text(dice: random.Random, length: int, words: int) -> tuple[int, ...]:
    return tuple(dice.choices(range(3, words), k=length))


TIMES = {"rate", "pause", "think"}


def _check(**given: float) -> None:
    for name, value in given.items():
        low = 4 if name == "words" else 1
        if name in TIMES and (not isinstance(value, int | float) or not 1e-9 <= value < float("inf")):
            raise ValueError(f"{name}={value!r} is out of range (allowed: above 0)")
        if name not in TIMES and (not isinstance(value, int) or value < low):
            raise ValueError(f"{name}={value!r} is out of range (allowed: whole numbers from {low} on)")


def fresh_tokens() -> Iterator[int]:
    """Token ids that nobody has: what a simulated model makes."""
    number = 1 << 40
    while True:
        yield number
        number += 1
