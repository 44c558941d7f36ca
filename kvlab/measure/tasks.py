"""Tasks with an answer that is right or wrong: what perplexity hides."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvlab.cache import KVCache
from kvlab.lab import Lab, Progress
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
