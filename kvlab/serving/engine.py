"""Engine: many requests through one real model, in batches that change at every step.

    engine = Engine(lab, kv_memory="64 MB")
    for done in engine.generate(["Once upon a time", "The capital of France is"]):
        print(done.text)

The tokens of all requests of a step pass the model packed into one row; attention reads each request's blocks.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvlab.cache import packed_forward
from kvlab.lab import Lab
from kvlab.serving.block_pool import BlockPool, memory_of
from kvlab.serving.pages import PagedCache, format_of, shapes_of, strategy_of
from kvlab.serving.prefix_tree import PrefixTree
from kvlab.serving.request import FINISHED, Request, Sampling
from kvlab.serving.scheduler import Plan, Scheduler
from kvlab.strategy import Strategy


@dataclass(frozen=True)
class Completion:
    """What a request said. ``reason``: stop, length, cancelled, deadline, error (the model's output was not finite). Times in seconds of the engine's clock; ``cached``: prompt tokens that the prefix
    tree had.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    reason: str
    prompt_tokens: int
    cached: int
    first_token_time: float | None
    token_times: tuple[float, ...]
    preemptions: int


@dataclass(frozen=True)
class Metrics:
    """The engine's state, in the names that servers use. Shares are 0 to 1.

    ``kv_usage``: blocks that sequences or the prefix tree hold; ``fragmentation``: places of the sequences' blocks with no token in them; ``prefix_hit_rate``:
    of the ``prompt_tokens`` admitted, the share that the tree had (``cached_tokens``). ``first_token``, ``per_token``: medians, seconds. ``throughput``: new tokens a second of the time in
    which anything ran; ``busy``: the share of that time in which the model ran.
    """

    running: int
    waiting: int
    finished: int
    kv_usage: float
    fragmentation: float
    prefix_hit_rate: float
    preemptions: int
    steps: int
    tokens_computed: int
    tokens_made: int
    prompt_tokens: int
    cached_tokens: int
    first_token: float | None
    per_token: float | None
    throughput: float
    busy: float


@dataclass
class _Count:
    finished: int = 0
    steps: int = 0
    computed: int = 0
    made: int = 0
    asked: int = 0
    cached: int = 0
    model: float = 0.0
    whole: float = 0.0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


class Engine:
    """Args:
        lab: the model. strategy: what goes into the blocks; Dense, Int with 8 or 4 bits or Fp8, with Everything or Window.
        kv_memory: bytes of all blocks, a number or "64 MB". block_size: tokens of a block.
        prefix_caching: share beginnings that are the same. Off with a window.
        batching, token_budget, max_running, preempt, reserve: as in :class:`Scheduler`. policy: who leaves the prefix tree first.
        clock: seconds; another one for tests.

    Raises ``ValueError`` for memory below one block and what :class:`Scheduler` and :func:`format_of` refuse.
    """

    def __init__(
        self, lab: Lab, strategy: Strategy | None = None, *, kv_memory: int | str = "64 MB", block_size: int = 16, prefix_caching: bool = True,
        batching: str = "continuous", token_budget: int = 512, max_running: int = 64, preempt: str = "recompute", reserve: str = "blocks", policy: str = "lru",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.lab, self.strategy, self.clock = lab, strategy_of(strategy), clock
        self.block_bytes = block_bytes(lab, self.strategy, block_size)
        blocks = int(memory_of(kv_memory) // self.block_bytes)
        if blocks < 1:
            raise ValueError(
                f"kv_memory={kv_memory!r} is less than one block of {block_size} tokens (allowed: {self.block_bytes:,.0f} bytes or more)"
            )
        try:
            self.cache = PagedCache(lab.model, self.strategy, blocks, block_size)
        except RuntimeError as error:  # torch's words for memory that is not there
            raise ValueError(f"kv_memory={kv_memory!r} cannot be had on {lab.device}: {str(error).splitlines()[0]}") from error
        self.pool = BlockPool(blocks, block_size)
        window = self.cache.window
        self.tree = PrefixTree(self.pool, policy) if prefix_caching and window is None else None
        self.scheduler = Scheduler(
            self.pool, self.tree, batching=batching, token_budget=token_budget, max_running=max_running, preempt=preempt, reserve=reserve,
            window=None if window is None else window + 1, sinks=self.cache.sinks, partial=self.cache.coding is None,
        )  # fmt: skip
        self.plan = Plan()  # of the last step
        self._away: dict[str, list[list[Tensor]]] = {}
        self._dice: dict[str, torch.Generator] = {}
        self._names = (f"request-{number}" for number in itertools.count())
        self._count = _Count()
        self._last: dict[str, float] = {}

    def add(
        self,
        prompt: str | Tensor | Iterable[int],
        sampling: Sampling | None = None,
        *,
        id: str | None = None,
        salt: Hashable = None,
        deadline: float | None = None,
    ) -> Request:
        """Queue a request; ``deadline``: seconds from now. Raises ``ValueError`` for an empty prompt, a duplicate id, one that does not fit the model's context
        or could not be served with all blocks for itself.
        """
        if sampling is not None and not isinstance(sampling, Sampling):
            raise ValueError(f"sampling={sampling!r} is no Sampling (allowed: kvlab.serving.Sampling(...), or None)")
        if deadline is not None and not isinstance(deadline, int | float):
            raise ValueError(f"deadline={deadline!r} is no number of seconds")
        sampling, now = sampling or Sampling(), self.clock()
        ids = self._ids(prompt)
        if len(ids) + sampling.max_new_tokens > self.lab.context:
            raise ValueError(
                f"{len(ids)} tokens and {sampling.max_new_tokens} new ones are more than the model's context (allowed: {self.lab.context} together)"
            )
        request = Request(
            next(self._names) if id is None else id, ids, sampling, now, None if deadline is None else now + deadline, salt
        )
        self.scheduler.add(request)
        if sampling.temperature:
            self._dice[request.id] = torch.Generator().manual_seed(sampling.seed)
        return request

    def _ids(self, prompt: str | Tensor | Iterable[int]) -> tuple[int, ...]:
        if isinstance(prompt, Tensor) and (prompt.dim() > 2 or (prompt.dim() == 2 and prompt.shape[0] != 1)):
            raise ValueError(f"prompt ids have the shape {tuple(prompt.shape)} (allowed: [n] or [1, n])")
        if isinstance(prompt, str):
            return tuple(self.lab.encode_long(prompt)[0].tolist()) if prompt else ()
        if not isinstance(prompt, Tensor | Iterable):
            raise ValueError(f"prompt={prompt!r} is neither text nor token ids")
        found = prompt.flatten().tolist() if isinstance(prompt, Tensor) else list(prompt)
        wrong = [
            one
            for one in found
            if not isinstance(one, int)
            or isinstance(one, bool)
            or not 0 <= one < self.lab.model.config.get_text_config(decoder=True).vocab_size
        ]
        if wrong:
            raise ValueError(f"prompt: {wrong[0]!r} is no token of this model")
        return tuple(found)

    def cancel(self, id: str, reason: str = "cancelled") -> None:
        """End a request. Raises ``ValueError`` for an id that is not there."""
        self._leave(self.scheduler.cancel(id, reason, self.clock()))

    def fork(self, id: str, sampling: Sampling | None = None, *, new: str | None = None) -> Request:
        """A second answer to a request that runs, from where it is: it shares all blocks, and whoever writes to one first copies it.

        ``sampling``: how it goes on, ``max_new_tokens`` counting what was said already; for another answer give it a temperature and a seed of its own. None: as the
        first one, its dice included, so it says the same. Raises ``ValueError`` unless ``id`` runs, and where there is no room for one more.
        """
        old = self.scheduler.requests.get(id)
        chosen = sampling or (old.sampling if old is not None else None)
        if old is not None and chosen is not None and len(old.prompt) + chosen.max_new_tokens > self.lab.context:
            raise ValueError(
                f"max_new_tokens={chosen.max_new_tokens} is out of range (allowed: up to {self.lab.context - len(old.prompt)}, by the model's context)"
            )
        made = self.scheduler.fork(id, next(self._names) if new is None else new, sampling)
        if made.sampling.temperature:
            dice = self._dice[made.id] = torch.Generator().manual_seed(made.sampling.seed)
            if sampling is None:
                dice.set_state(self._dice[id].get_state())
        return made

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """One pass of the model over what the scheduler has chosen -> requests that are finished by it."""
        begun = self.clock()
        before = dict(self.scheduler.requests)
        plan = self.plan = self.scheduler.plan(begun)
        lost = [request for request in before.values() if request.status == FINISHED]  # past their deadline
        for request in lost:
            self._leave(request)
        made: dict[str, int] = {}
        stop: dict[str, str] = {}
        if plan.work:
            try:
                self._move(plan)
                logits = self._run(plan)
                likeliest, finite = logits.argmax(-1).tolist(), logits.isfinite().all(-1).tolist()  # one wait for the device
                model = self.clock() - begun
                makers = [work.request for work in plan.work if work.makes]
                for number, request in enumerate(makers):
                    if not finite[number]:  # this one's text is too much for the model; the others go on
                        lost.append(self.scheduler.cancel(request.id, "error", self.clock()))
                        self._leave(request)
                        continue
                    dice = request.sampling.temperature > 0
                    made[request.id] = token = self._throw(request, logits[number].cpu()) if dice else likeliest[number]
                    if reason := self._stops(request, token):
                        stop[request.id] = reason
            except BaseException:
                self.scheduler.abandon(plan)
                raise
            self._count.model += model
        now = self.clock()
        finished = self.scheduler.done(plan, made, now, stop=stop)
        self._note(plan, made, begun, now)
        for request in finished:
            self._leave(request)
        return [self._completion(request) for request in (*lost, *finished)]

    def stream(self, id: str) -> Iterator[str]:
        """The text of one request as it comes, other requests going on beside it; what stops it is not given out."""
        request = self.scheduler.requests.get(id)
        if request is None:
            raise ValueError(f"request {id!r} is not there: unknown, finished or cancelled")
        said = ""
        while request.status != FINISHED:
            self.step()
            text = self.text(request)
            safe = len(text) if request.status == FINISHED else len(text) - self.undecided(request, text)
            if safe > len(said):
                yield text[len(said) : safe]
                said = text[:safe]

    def generate(self, prompts: Iterable[Any], sampling: Sampling | None = None) -> list[Completion]:
        """All prompts together -> their completions, in the order of the prompts. What a prompt refuses is raised before any is run."""
        if isinstance(prompts, str):
            raise ValueError("prompts is one text (allowed: a list of texts, or of token ids)")
        asked: list[Request] = []
        try:
            for prompt in prompts:
                asked.append(self.add(prompt, sampling))
        except ValueError:
            for request in asked:
                self.cancel(request.id)
            raise
        while any(request.status != FINISHED for request in asked):
            self.step()
        return [self._completion(request) for request in asked]

    def text(self, request: Request) -> str:
        """What the request has said so far, up to what stops it."""
        eos = self._eos() if not request.sampling.ignore_eos else set()
        text = self.lab.tokenizer.decode([token for token in request.output if token not in eos])
        ends = [at for at in (text.find(stop) for stop in request.sampling.stop) if at >= 0]
        return text[: min(ends)] if ends else text

    def metrics(self) -> Metrics:
        count, requests = self._count, self.scheduler.running
        held = sum(sum(block >= 0 for block in request.blocks) for request in requests) * self.pool.block_size
        full = sum(
            min(request.computed, sum(block >= 0 for block in request.blocks) * self.pool.block_size) for request in requests
        )
        return Metrics(
            running=len(requests),
            waiting=len(self.scheduler.waiting),
            finished=count.finished,
            kv_usage=self.pool.usage,
            fragmentation=1 - full / held if held else 0.0,
            prefix_hit_rate=count.cached / count.asked if count.asked else 0.0,
            preemptions=self.scheduler.preempted,
            steps=count.steps,
            tokens_computed=count.computed,
            tokens_made=count.made,
            prompt_tokens=count.asked,
            cached_tokens=count.cached,
            first_token=statistics.median(count.first) if count.first else None,
            per_token=statistics.median(count.between) if count.between else None,
            throughput=count.made / count.whole if count.whole else 0.0,
            busy=count.model / count.whole if count.whole else 0.0,
        )

    # inside a step

    def _move(self, plan: Plan) -> None:
        for request, blocks in plan.out:
            self._away[request.id] = self.cache.take_out(blocks)
        for request, blocks in plan.back:
            self.cache.bring_back(blocks, self._away.pop(request.id))
        for source, target, count in plan.copies:
            self.cache.copy(source, target, count)

    def _run(self, plan: Plan) -> Tensor:
        """Logits of the last token of each work that makes one, float32 ``[n, vocabulary]``."""
        self.cache.begin(plan.work)
        starts = self.cache.step.starts
        ids = [token for work in plan.work for token in work.request.tokens[work.start : work.start + work.count]]
        places = [place for work in plan.work for place in range(work.start, work.start + work.count)]
        last = [start + work.count - 1 for start, work in zip(starts, plan.work, strict=True) if work.makes]
        return packed_forward(
            self.lab.model, torch.tensor([ids]), torch.tensor([places]), self.cache, torch.tensor(last, dtype=torch.int64)
        )

    def _throw(self, request: Request, logits: Tensor) -> int:
        """A token by the request's own dice."""
        sampling = request.sampling
        chances = (logits / sampling.temperature).softmax(-1)
        if sampling.top_p < 1.0:
            order = chances.sort(descending=True)
            kept = order.values.cumsum(-1) - order.values < sampling.top_p
            chances = torch.zeros_like(chances).scatter_(-1, order.indices[kept], order.values[kept])
        return int(torch.multinomial(chances, 1, generator=self._dice[request.id]))

    def _stops(self, request: Request, token: int) -> str:
        if not request.sampling.ignore_eos and token in self._eos():
            return "stop"
        if request.sampling.stop:
            text = self.lab.tokenizer.decode([*request.output, token])
            if any(stop in text for stop in request.sampling.stop):
                return "stop"
        return ""

    def _eos(self) -> set[int]:
        config = getattr(self.lab.model, "generation_config", None)
        found = getattr(config, "eos_token_id", None) or getattr(self.lab.tokenizer, "eos_token_id", None)
        return set(found if isinstance(found, list) else [] if found is None else [found])

    def undecided(self, request: Request, text: str) -> int:
        """Characters at the end that may yet become a stop text, or the rest of a letter."""
        most = 1 if text.endswith("\ufffd") else 0
        for stop in request.sampling.stop:
            most = max([most, *(size for size in range(1, len(stop)) if text.endswith(stop[:size]))])
        return most

    def _note(self, plan: Plan, made: dict[str, int], begun: float, now: float) -> None:
        count = self._count
        count.steps += bool(plan.work)
        count.computed += plan.tokens
        count.made += len(made)
        count.whole += now - begun
        for work in plan.work:
            request = work.request
            if request.id not in self._last:  # its first piece
                self._last[request.id] = now
                count.asked += len(request.prompt)
                count.cached += request.cached
            if request.id in made:
                if len(request.times) == 1:
                    count.first.append(request.times[0] - request.arrival)
                else:
                    count.between.append(request.times[-1] - request.times[-2])

    def _leave(self, request: Request) -> None:
        self._count.finished += 1
        for one in (self._away, self._dice, self._last):
            one.pop(request.id, None)  # type: ignore[attr-defined]

    def _completion(self, request: Request) -> Completion:
        return Completion(
            request.id, self.text(request), tuple(request.output), request.reason, len(request.prompt), request.cached, request.first_token_time,
            tuple(request.times), request.preemptions,
        )  # fmt: skip


def block_bytes(lab: Lab, strategy: Strategy, block_size: int) -> float:
    """Bytes of one block of ``block_size`` tokens, all layers and heads. Raises ``ValueError`` for a strategy that cannot be paged, or fewer than 1 token."""
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size={block_size!r} is out of range (allowed: 1 or more)")
    plain = next(lab.model.parameters()).element_size()
    return sum(
        heads * format_of(strategy, block_size, key_dim, value_dim).bytes(block_size, key_dim, value_dim, plain)
        for heads, key_dim, value_dim in shapes_of(lab.model)
    )
