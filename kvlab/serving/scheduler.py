"""Scheduler: which tokens of which requests are computed in the next step, and whose blocks make room for them.

Nothing here knows a model or a tensor: the engine computes what :meth:`Scheduler.plan` says, the simulator only lets its clock run on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlab.serving.block_pool import BlockPool, OutOfBlocks
from kvlab.serving.prefix_tree import PrefixTree
from kvlab.serving.request import FINISHED, RUNNING, SWAPPED, WAITING, Request, Sampling

BATCHING = ("continuous", "static")
RESERVE = ("blocks", "worst")
PREEMPT = ("recompute", "swap")


@dataclass(frozen=True)
class Work:
    """Tokens ``start`` to ``start + count`` of a request; where that is all of them, a new token comes of it."""

    request: Request
    start: int
    count: int

    @property
    def makes(self) -> bool:
        return self.start + self.count == self.request.length


@dataclass
class Plan:
    """One step. First, in this order: ``out`` (blocks whose content is put away, by request), ``back`` (brought back into these blocks), ``copies`` (of
    ``count`` tokens from block to block). Then ``work``. ``held``: blocks that must not change before that is done.
    """

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    out: list[tuple[Request, list[int]]] = field(default_factory=list)
    back: list[tuple[Request, list[int]]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(work.count for work in self.work)

    @property
    def read(self) -> int:
        """Tokens of cache that its queries see."""
        return sum(work.start + work.count for work in self.work)


class Scheduler:
    """First come, first served: the oldest request always goes on, so none starves.

    Args:
        pool, tree: the blocks; without a tree no prefix is shared.
        batching: "continuous": a request joins as soon as there is room, and leaves when it is done; "static": a batch begins together, and the next one when
            all of it are done.
        reserve: "blocks": a request takes blocks as it grows; "worst": all that it could ever need, from the start.
        token_budget: tokens of a step, decode steps before pieces of prompts (chunked prefill).
        max_running: requests at once.
        preempt: what becomes of the youngest request where blocks run out: "recompute" forgets its keys and values, "swap" puts them away.
        partial: a block that begins like a text and goes on otherwise is copied as far as it is alike; not where full blocks are codes.
        window, sinks: of a model or strategy that sees so far only; blocks that fell out are given back. Not beside a tree.

    Raises ``ValueError`` for what is out of range or does not go together.
    """

    def __init__(
        self, pool: BlockPool, tree: PrefixTree | None = None, *, batching: str = "continuous", reserve: str = "blocks", token_budget: int = 512,
        max_running: int = 64, preempt: str = "recompute", window: int | None = None, sinks: int = 0,
        partial: bool = True,
    ) -> None:  # fmt: skip
        for name, chosen, allowed in (
            ("batching", batching, BATCHING),
            ("reserve", reserve, RESERVE),
            ("preempt", preempt, PREEMPT),
        ):
            if chosen not in allowed:
                raise ValueError(f"{name}={chosen!r} is not one of {', '.join(allowed)}")
        for name, value in (("token_budget", token_budget), ("max_running", max_running)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} is out of range (allowed: 1 or more)")
        if window is not None and tree is not None:
            raise ValueError("a window gives blocks back that a prefix tree would lend again: take one of the two")
        if tree is not None and tree.pool is not pool:
            raise ValueError("the prefix tree lends blocks of another pool")
        self.pool, self.tree, self.batching, self.reserve = pool, tree, batching, reserve
        self.token_budget, self.max_running, self.preempt = token_budget, max_running, preempt
        self.window, self.sinks, self.partial = window, sinks, partial
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.requests: dict[str, Request] = {}  # that are not finished
        self.preempted = 0

    def add(self, request: Request) -> None:
        """Raises ``ValueError`` for an id in use, or a request that could not be served with all blocks for itself."""
        if request.id in self.requests:
            raise ValueError(f"request {request.id!r} is there already")
        self._fits(request)
        self.requests[request.id] = request
        self.waiting.append(request)

    def _fits(self, request: Request) -> None:
        need = self.pool.needed(request.most if self.window is None else min(request.most, self._widest()))
        if need > self.pool.blocks:
            raise ValueError(
                f"request {request.id!r} needs up to {need} blocks of {self.pool.block_size} tokens, the pool has {self.pool.blocks} "
                f"(allowed: prompt and new tokens together up to {self.pool.blocks * self.pool.block_size})"
            )

    def cancel(self, name: str, reason: str = "cancelled", now: float = 0.0) -> Request:
        """End a request wherever it is. Raises ``ValueError`` for an id that is not there (or is finished)."""
        if name not in self.requests:
            raise ValueError(f"request {name!r} is not there: unknown, finished or cancelled")
        request = self.requests[name]
        self._finish(request, reason, now)
        return request

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def plan(self, now: float = 0.0) -> Plan:
        """What is computed next. An empty plan: nothing is left to do."""
        for request in [one for one in self.requests.values() if one.deadline is not None and one.deadline < now]:
            self._finish(request, "deadline", now)
        plan, budget, preempted = Plan(), self.token_budget, self.preempted
        join = self.batching == "continuous" or not self.running
        for request in list(self.running):
            if budget and request.status == RUNNING:
                budget -= self._go_on(plan, request, budget)
        if join and self.preempted == preempted:  # else there is no room: whoever lost its blocks would take them back at once
            self._admit(plan, budget, now)
        return plan

    def _go_on(self, plan: Plan, request: Request, budget: int) -> int:
        """Give a running request the blocks of its next tokens; the youngest make room -> tokens."""
        count = min(request.left, budget)
        while not self._grow(plan, request, count):
            youngest = self.running[-1]
            self._preempt(plan, youngest)
            if youngest is request:
                return 0
        plan.work.append(Work(request, request.computed, count))
        return count

    def _admit(self, plan: Plan, budget: int, now: float) -> None:
        """Let waiting requests join, in their order, while there is room."""
        static = self.batching == "static"
        while self.waiting and (budget or static) and len(self.running) < self.max_running:
            request = self.waiting[0]
            count = self._join(plan, request, budget)
            if count is None:
                break
            self.waiting.popleft()
            request.status = RUNNING
            request.admitted = now if request.admitted is None else request.admitted
            self.running.append(request)
            if count:
                plan.work.append(Work(request, request.computed, count))
                budget -= count

    def _join(self, plan: Plan, request: Request, budget: int) -> int | None:
        """Blocks for a waiting request: what the tree knows, what was put away, and its next piece -> tokens; None: there is no room, and nothing was taken."""
        for borrow in (
            True,
            False,
        ):  # a block that is only copied from stands in the way for a step: a request alone must not wait for itself
            mark = (len(plan.copies), len(plan.held))
            try:
                return self._begin(plan, request, budget, borrow)
            except OutOfBlocks:
                self._give_back(request)
                self.pool.release(plan.held[mark[1] :])
                del plan.copies[mark[0] :], plan.held[mark[1] :]
                if request.status != SWAPPED:
                    request.computed = 0
                    request.cached = request.cached if request.admitted is not None else 0
                if self.running or self.tree is None:
                    break
        return None

    def _begin(self, plan: Plan, request: Request, budget: int, borrow: bool) -> int:
        away = request.status == SWAPPED
        if away:
            new = iter(self._take(sum(request.layout)))
            request.blocks = [next(new) if there else -1 for there in request.layout]
        elif borrow and self.tree is not None:
            self._borrow(plan, request)
        count = min(request.left, budget)
        whole = (
            request.most if self.reserve == "worst" else request.length if self.batching == "static" else request.computed + count
        )
        # everybody who runs can go on into another block: else the newcomer is soon the one who must make room
        self._take_up_to(request, whole, spare=len(self.running) if self.reserve == "blocks" else 0)
        if away:
            plan.back.append((request, [block for block in request.blocks[: len(request.layout)] if block >= 0]))
            request.layout = []
        return count

    def _borrow(self, plan: Plan, request: Request) -> None:
        """Begin with what the tree knows of the text."""
        assert self.tree is not None
        found = self.tree.match(request.tokens, request.salt)
        self.pool.share(found.blocks)
        request.blocks, request.computed = list(found.blocks), len(found.blocks) * self.pool.block_size
        if found.partial is not None and self.partial:
            self.pool.share([found.partial])
            plan.held.append(found.partial)
            (own,) = self._take(1)
            request.blocks.append(own)
            request.computed += found.count
            plan.copies.append((found.partial, own, found.count))
        if request.admitted is None:  # what comes back after it made room finds its own
            request.cached = min(request.computed, len(request.prompt))

    def _grow(self, plan: Plan, request: Request, count: int) -> bool:
        """Blocks for ``count`` more tokens, and a copy of a block that others read and this would write -> whether there was room."""
        size = self.pool.block_size
        try:
            self._take_up_to(request, request.computed + count)
            at = request.computed // size
            # what the plan itself holds is read before anything is written, so the last one needs no copy
            if request.computed % size and self._readers(plan, request.blocks[at]) > 1:
                self._clear(1)
                shared = request.blocks[at]
                request.blocks[at], _ = self.pool.own(shared)
                plan.held.append(shared)  # the plan releases it once it has been copied
                plan.copies.append((shared, request.blocks[at], request.computed % size))
        except OutOfBlocks:
            return False
        return True

    def _readers(self, plan: Plan, block: int) -> int:
        return self.pool.references(block) - plan.held.count(block)

    def _take_up_to(self, request: Request, tokens: int, spare: int = 0) -> None:
        count = max(0, self.pool.needed(tokens) - len(request.blocks))
        if count:
            request.blocks += self._take(count, spare)

    def _take(self, count: int, spare: int = 0) -> list[int]:
        self._clear(count, spare)
        return self.pool.allocate(count)

    def _clear(self, count: int, spare: int = 0) -> None:
        """Have ``count`` blocks free, and ``spare`` more, out of the tree if need be."""
        if self.tree is not None and count + spare > self.pool.free:
            self.tree.evict(count + spare - self.pool.free)
        if count + spare > self.pool.free:
            raise OutOfBlocks(f"{count} blocks are wanted and {spare} left over, {self.pool.free} are free")

    def _preempt(self, plan: Plan, request: Request) -> None:
        """Take a running request's blocks away; it is the next to come back."""
        self.running.remove(request)
        request.preemptions += 1
        self.preempted += 1
        if self.preempt == "swap" and request.computed:
            held = request.blocks[: self.pool.needed(request.computed)]
            request.layout = [block >= 0 for block in held]
            plan.out.append((request, [block for block in held if block >= 0]))  # read before anything is written in this step
            self._give_back(request)
            request.status = SWAPPED
        else:
            self._remember(request)
            self._give_back(request)
            request.computed, request.status = 0, WAITING
        self.waiting.appendleft(request)

    def done(
        self, plan: Plan, made: Mapping[str, int], now: float = 0.0, *, stop: Mapping[str, str] | None = None
    ) -> list[Request]:
        """The step was computed; ``made``: request id -> its new token; ``stop``: id -> why it ends with it -> requests that are finished.

        Raises ``ValueError`` if a token that the plan makes is missing.
        """
        self.pool.release(plan.held)
        plan.held = []
        finished = []
        for work in plan.work:
            request = work.request
            if request.status == FINISHED:  # cancelled in the meantime
                continue
            makes = work.makes
            if makes and request.id not in made:
                raise ValueError(f"request {request.id!r}: the step makes a token, and none is given")
            reading = work.start < len(request.prompt)
            request.computed = work.start + work.count
            if reading:  # after each piece: whoever comes meanwhile need not compute it as well
                self._remember(request)
            self._shorten(request)
            if makes:
                request.output.append(made[request.id])
                request.times.append(now)
                reason = (stop or {}).get(request.id) or (
                    "length" if len(request.output) >= request.sampling.max_new_tokens else ""
                )
                if reason:
                    self._finish(request, reason, now)
                    finished.append(request)
        return finished

    def abandon(self, plan: Plan) -> None:
        """The step failed, and nobody knows what was written: its requests begin anew, in their order."""
        self.pool.release(plan.held)
        plan.held = []
        touched = [work.request for work in plan.work] + [request for request, _ in (*plan.out, *plan.back)]
        for request in sorted(set(touched), key=lambda one: (one.arrival, one.id), reverse=True):
            if request.status == FINISHED:
                continue
            if request.status == RUNNING:
                self.running.remove(request)
                self.waiting.appendleft(request)
            self._give_back(request)
            request.computed = request.cached = 0
            request.status, request.layout = WAITING, []

    def _finish(self, request: Request, reason: str, now: float) -> None:
        if request.status == RUNNING:
            self._remember(request)
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._give_back(request)
        request.status, request.reason, request.finished = FINISHED, reason, now
        del self.requests[request.id]

    def fork(self, name: str, new: str, sampling: Sampling | None = None) -> Request:
        """A second request that goes on from the same tokens, all blocks shared; whoever writes first copies. ``sampling``: how it goes on, if not the same way;
        its ``max_new_tokens`` count what was said already.

        Raises ``ValueError`` unless ``name`` runs.
        """
        request = self.requests.get(name)
        if request is None or request.status != RUNNING:
            raise ValueError(f"request {name!r} is not running, so there is nothing to share")
        if new in self.requests:
            raise ValueError(f"request {new!r} is there already")
        if len(self.running) >= self.max_running:
            raise ValueError(f"max_running={self.max_running} requests run already")
        if sampling is not None and sampling.max_new_tokens <= len(request.output):
            raise ValueError(
                f"max_new_tokens={sampling.max_new_tokens} is out of range (allowed: more than the {len(request.output)} tokens that request {name!r} has said)"
            )
        made = Request(new, request.prompt, sampling or request.sampling, request.arrival, request.deadline, request.salt)
        self._fits(made)
        held = self.pool.needed(request.computed)
        self.pool.share(block for block in request.blocks[:held] if block >= 0)
        made.status, made.output, made.blocks, made.computed = (
            RUNNING,
            list(request.output),
            request.blocks[:held],
            request.computed,
        )
        made.admitted, made.times, made.cached = request.admitted, list(request.times), request.cached
        self.requests[new] = made
        self.running.append(made)
        return made

    def _remember(self, request: Request) -> None:
        """Let the tree know the full blocks of what has been computed."""
        if self.tree is not None and request.computed >= self.pool.block_size:
            full = request.computed // self.pool.block_size
            tokens = request.tokens[: full * self.pool.block_size]
            request.blocks[:full] = self.tree.insert(tokens, request.blocks[:full], request.salt)

    def _shorten(self, request: Request) -> None:
        """Give back the blocks that no later token can see."""
        if self.window is None:
            return
        size = self.pool.block_size
        first, last = self.pool.needed(self.sinks), max(0, request.computed - self.window) // size
        gone = [at for at in range(first, last) if request.blocks[at] >= 0]
        self.pool.release(request.blocks[at] for at in gone)
        for at in gone:
            request.blocks[at] = -1

    def _widest(self) -> int:
        """Tokens in whole blocks that a request with a window holds at most, a step's piece included."""
        assert self.window is not None
        return self.window + self.sinks + self.token_budget + 2 * self.pool.block_size

    def _give_back(self, request: Request) -> None:
        self.pool.release(block for block in request.blocks if block >= 0)
        request.blocks = []
