"""One run of the bench, stage by stage: what a panel shows, and a script can have without one.

    session = Session(lab)
    for stage in session.run(Request(strategy, prompt)):
        print(stage)

The stages come as they are ready, cheap ones first: `Prediction`, `Ran`, `Scores`, `Needle`, `Row`. What the full
cache does with a prompt is recorded once and reused, for the two newest prompts; so are the strategies' latest results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvlab.cache import KVCache
from kvlab.lab import Generation, Lab, Progress
from kvlab.measure.latency import summarize
from kvlab.measure.look import Attention, Error, Heads, error
from kvlab.measure.memory import held
from kvlab.measure.quality import Control, Quality, control, quality
from kvlab.measure.scale import Prediction, prediction
from kvlab.measure.tasks import Needle, needle
from kvlab.memory import Memory
from kvlab.strategy import Strategy

SCORED = 512  # tokens scored at most: the control keeps a row of the vocabulary for each
NEEDLE_TOKENS = 512
KEPT = 12  # results kept of each kind

T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What to run. ``layer``: the one to look into. ``step``: tokens a scoring step. ``depth``: where the needle hides (0 the
    start, 1 the end)."""

    strategy: Strategy
    prompt: str
    layer: int = 0
    new_tokens: int = 24
    step: int = 16
    depth: float = 0.25


@dataclass(frozen=True)
class Ran:
    """The strategy's run of the prompt beside the full cache's. ``words``: the text of each new token. ``error``: what was kept
    of the prompt in the layer looked into, against the full cache."""

    generation: Generation
    full: Generation
    attention: Attention
    error: Error
    words: tuple[str, ...]


@dataclass(frozen=True)
class Scores:
    """Quality along the prompt's second half; None where the prompt has a single token. ``words``: the text of each scored token.

    ``evicted``: how many tokens had been evicted when each was predicted, int64 ``[scored]``.
    """

    quality: Quality
    words: tuple[str, ...]
    evicted: Tensor
    prefill: int
    step: int


@dataclass(frozen=True)
class Row:
    """A line of the table. Times in seconds, from one run; None: not measured (a prompt of one token cannot be scored)."""

    strategy: Strategy
    tokens: int
    memory: Memory
    first_token: float
    per_token: float | None
    cold: bool
    perplexity: float | None
    perplexity_change: float | None
    kl: float | None
    agreement: float | None
    found: bool | None


Stage = Prediction | Ran | Scores | Needle | Row


@dataclass
class _Recorded:
    """The full cache's run of one prompt; ``cache`` still holds the exact keys and values."""

    generation: Generation
    cache: KVCache
    control: Control | None = None


class Session:
    """A lab and what has been recorded on it. Not for two threads at once."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._geometry = lab.geometry
        self._lengths: dict[str, int] = {}
        self._recorded: OrderedDict[tuple[str, int, int], _Recorded] = OrderedDict()
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    @property
    def bits(self) -> int:
        """The width of the model's own numbers."""
        return torch.finfo(next(self.lab.model.parameters()).dtype).bits

    def tokens(self, prompt: str) -> int:
        """How many tokens a prompt has. Raises ``ValueError`` for an empty one or one longer than the model's context."""
        if prompt not in self._lengths:
            self._lengths[prompt] = self.lab.encode(prompt).shape[1]
        return self._lengths[prompt]

    def predict(self, strategy: Strategy, prompt: str, new_tokens: int = 24) -> Prediction:
        """Needs no model run: milliseconds, and once the prompt is known not even its tokenizer."""
        return prediction(self._geometry, strategy, self.tokens(prompt) + new_tokens - 1, self.bits)

    def run(self, request: Request, progress: Progress | None = None, *, fresh: bool = False) -> Iterator[Stage]:
        """The stages, each as soon as it is known. ``progress`` is called between steps; what it raises ends the run there.

        ``fresh``: measure the strategy again, even if the same run has just been made. Raises ``ValueError`` for what is wrong
        with the request, at the first stage that meets it.
        """
        progress = progress or (lambda stage, done, total: None)
        strategy, lab = request.strategy, self.lab
        if fresh:
            self._kept = OrderedDict((key, value) for key, value in self._kept.items() if key[1] != strategy)
        yield self.predict(strategy, request.prompt, request.new_tokens)
        ids = lab.encode(request.prompt)

        recorded = self._record(request, ids, progress)
        key: tuple[Any, ...] = ("ran", strategy, request.prompt, request.new_tokens, request.layer)
        ran = self._keep(key, lambda: self._ran(request, ids, recorded, progress))
        yield ran

        scores = None
        if ids.shape[1] > 1:
            against = self._control(recorded, request, ids, progress)
            key = ("scores", strategy, request.prompt, request.step)
            scores = self._keep(key, lambda: self._scores(request, against, progress))
            yield scores
        hidden = self.needle(strategy, request.depth, progress)
        if hidden is not None:
            yield hidden
        yield row(ran.generation, scores, hidden)

    def full_row(self, request: Request, progress: Progress | None = None) -> Row:
        """The same line for the full cache, from what is recorded of the prompt."""
        found = self.needle(Strategy(), request.depth, progress)
        recorded = self._recorded[(request.prompt, request.new_tokens, request.step)]
        line = row(recorded.generation, None, found)
        if recorded.control is None:
            return line
        perplexity = recorded.control.perplexity
        return Row(**{**vars(line), "perplexity": perplexity, "perplexity_change": 0.0, "kl": 0.0, "agreement": 1.0})

    def needle(self, strategy: Strategy, depth: float, progress: Progress | None = None) -> Needle | None:
        """Found or lost; None where the model's context is too short to hide anything in."""
        tokens = min(NEEDLE_TOKENS, self.lab.context - 16)
        if tokens < 64:
            return None
        return self._keep(
            ("needle", strategy, depth),
            lambda: needle(self.lab, strategy, tokens=tokens, depth=depth, progress=_named(progress, "needle")),
        )

    # the steps

    def _keep(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        self._kept.move_to_end(key)
        for old in [k for k in self._kept if k[0] == key[0]][:-KEPT]:
            del self._kept[old]
        return self._kept[key]

    def _ran(self, request: Request, ids: Tensor, recorded: _Recorded, progress: Progress) -> Ran:
        cache = KVCache(self.lab.model, request.strategy)
        if not 0 <= request.layer < len(cache.layers):
            raise ValueError(f"layer={request.layer} is out of range (allowed: 0 to {len(cache.layers) - 1})")
        watch = Heads(request.layer, ids.shape[1] + request.new_tokens - 1)
        cache.watch(watch)
        try:
            made = self.lab.generate(ids, cache=cache, max_new_tokens=request.new_tokens, progress=progress)
            off = error(cache, recorded.cache, request.layer, ids.shape[1])
        finally:
            cache.close()
        return Ran(made, recorded.generation, watch.attention(), off, self._words(made.tokens))

    def _record(self, request: Request, ids: Tensor, progress: Progress) -> _Recorded:
        key = (request.prompt, request.new_tokens, request.step)
        if key not in self._recorded:
            cache = KVCache(self.lab.model)
            made = self.lab.generate(ids, cache=cache, max_new_tokens=request.new_tokens, progress=_named(progress, "full cache"))
            self._recorded[key] = _Recorded(made, cache)
        self._recorded.move_to_end(key)
        while len(self._recorded) > 2:
            self._recorded.popitem(last=False)
        return self._recorded[key]

    def _control(self, recorded: _Recorded, request: Request, ids: Tensor, progress: Progress) -> Control:
        if recorded.control is None:
            n = ids.shape[1]
            prefill = max(1, n - min(n // 2, SCORED))
            recorded.control = control(self.lab, ids, prefill=prefill, step=request.step, progress=_named(progress, "full cache"))
        return recorded.control

    def _scores(self, request: Request, against: Control, progress: Progress) -> Scores:
        scored = quality(self.lab, request.strategy, against, progress=progress)
        prefill, step = against.prefill, against.step
        after_first = torch.arange(len(scored.loss) - 1) // step * step + prefill  # tokens read before each of them was predicted
        seen = torch.cat([torch.tensor([prefill]), after_first])
        chunk = request.strategy.chunk or prefill
        seen[0] = (prefill - 1) // chunk * chunk  # what the last piece of the prompt found evicted
        evicted = torch.tensor([n - held(self._geometry, request.strategy, n, bits=self.bits) for n in seen.tolist()])
        return Scores(scored, self._words(against.ids[0, prefill:].tolist()), evicted, prefill, step)

    def _words(self, tokens: Any) -> tuple[str, ...]:
        return tuple(self.lab.tokenizer.decode([token]) for token in tokens)


def row(made: Generation, scores: Scores | None, hidden: Needle | None) -> Row:
    """A line of the table from what a run gave."""
    times, own = summarize([made]), scores.quality if scores else None
    return Row(
        strategy=made.strategy,
        tokens=made.memory.seen,
        memory=made.memory,
        first_token=times.first_token,
        per_token=times.per_token if made.token_times else None,
        cold=made.cold,
        perplexity=own.perplexity if own else None,
        perplexity_change=own.perplexity_change if own else None,
        kl=own.mean_kl if own else None,
        agreement=own.agreement if own else None,
        found=hidden.found if hidden else None,
    )


def _named(progress: Progress | None, name: str) -> Progress | None:
    return None if progress is None else lambda stage, done, total: progress(f"{name}: {stage}", done, total)
