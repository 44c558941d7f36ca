"""simulate: the same pool, tree and scheduler as the engine's, on a clock that is worked out instead of waited for.

    simulate(traces.chat(1000), "Llama-3.1-70B", "H100 SXM 80GB", devices=8)

For what does not fit here: large models, thousands of requests, several replicas. Everything is predicted, and says so.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlab import geometry, hardware
from kvlab.geometry import Geometry
from kvlab.hardware import Hardware
from kvlab.keep.base import parse_bytes
from kvlab.keep.window import Window
from kvlab.serving.block_pool import BlockPool
from kvlab.serving.pages import format_of
from kvlab.serving.prefix_tree import PrefixTree
from kvlab.serving.request import Request, Sampling
from kvlab.serving.scheduler import Plan, Scheduler
from kvlab.serving.traces import Arrival, fresh_tokens
from kvlab.strategy import Strategy

ROUTING = ("round robin", "prefix")
HOW = {"batching", "reserve", "token_budget", "max_running", "preempt"}
RESERVE = 0.1  # of the devices' memory, for everything but weights and blocks

#: Seconds of a step, from its plan.
Clock = Callable[[Plan], float]


@dataclass(frozen=True)
class Fitted:
    """A clock by measurement: seconds for a step, for each of its tokens, and for each token of cache that is read."""

    step: float
    token: float
    read: float

    def __call__(self, plan: Plan) -> float:
        return self.step + self.token * plan.tokens + self.read * sum(work.start + work.count for work in plan.work)


def fit(steps: Sequence[tuple[int, int, float]]) -> Fitted:
    """A clock from measured steps ``(tokens, tokens of cache read, seconds)`` by least squares. Raises ``ValueError`` for fewer than 3 steps."""
    import numpy as np

    if len(steps) < 3:
        raise ValueError(f"{len(steps)} steps are too few to fit a clock (allowed: 3 or more)")
    table = np.array([[1.0, tokens, read] for tokens, read, _ in steps])
    found = np.linalg.lstsq(table, np.array([seconds for *_, seconds in steps]), rcond=None)[0]
    return Fitted(*(max(0.0, float(value)) for value in found))


@dataclass(frozen=True)
class Roofline:
    """A clock by the datasheets: weights once a step, the cache of each request once, two FLOP a weight and token, attention; whichever takes longest.

    ``overhead``: seconds of a step for what is neither.
    """

    shape: Geometry
    kind: Hardware
    token_bytes: float  # of cache
    devices: int = 1
    weight_bits: int = 16
    overhead: float = 0.0
    window: int | None = None  # tokens that a query sees at most

    def _seen(self, tokens: float) -> float:
        return tokens if self.window is None else min(tokens, self.window)

    def __call__(self, plan: Plan) -> float:
        tokens, sequences = plan.tokens, len(plan.work)
        share = hardware.weights_read(self.shape, max(1, sequences)) / (self.shape.parameters or 1)
        read = geometry.weight_bytes(self.shape, self.weight_bits) * share
        read += self.token_bytes * sum(self._seen(work.start + work.count) for work in plan.work)
        flops = 2.0 * (self.shape.active_parameters or 0) * tokens
        one = hardware.attention_flops(self.shape, 1)
        flops += one * sum(work.count * self._seen(work.start + work.count / 2) for work in plan.work)
        return self.overhead + max(read / (self.kind.bandwidth * self.devices), flops / ((self.kind.flops or 1) * self.devices))


@dataclass(frozen=True)
class Simulated:
    """What came of a trace, predicted. Times in seconds; medians and 95th percentiles over the requests that were served. ``usage``: (time, share of blocks in
    use) after each step; ``together``: the most requests that ran at once.
    """

    served: int
    refused: dict[str, int]
    seconds: float
    throughput: float
    first_token: float
    first_token_p95: float
    per_token: float
    prompt_tokens: int
    computed: int
    cached: int
    made: int
    preemptions: int
    together: int
    kv_usage: float
    usage: tuple[tuple[float, float], ...] = field(repr=False, default=())
    label: str = "predicted"

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt_tokens if self.prompt_tokens else 0.0


class _Replica:
    def __init__(self, blocks: int, block_size: int, prefix: bool, how: dict[str, Any], policy: str) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.tree = PrefixTree(self.pool, policy) if prefix else None
        self.scheduler = Scheduler(self.pool, self.tree, **how)
        self.now = 0.0


def simulate(
    trace: Sequence[Arrival], model: str | Geometry, device: str | Hardware, *, strategy: Strategy | None = None, devices: int = 1, weight_bits: int = 16,
    kv_memory: int | str | None = None, block_size: int = 16, prefix_caching: bool = True, policy: str = "lru", replicas: int = 1, routing: str = "round robin",
    clock: Clock | None = None, overhead: float = 0.0, **how: Any,
) -> Simulated:  # fmt: skip
    """Serve ``trace`` as an engine would.

    Args:
        strategy: what goes into the blocks, as for :class:`Engine`. kv_memory: bytes of all blocks of a replica; None: what weights leave of the devices.
        replicas: so many engines, each with ``devices`` devices. routing: "round robin", or "prefix": to the one whose tree knows most of the prompt, unless
            it has far more to do than another.
        clock: seconds of a step from its plan; None: the roofline, ``overhead`` seconds added to each step.
        how: batching, reserve, token_budget, max_running, preempt, as for :class:`Scheduler`.

    Raises ``ValueError`` for an empty trace, a model that does not fit, unknown names, or a strategy that cannot be paged.
    """
    if not trace:
        raise ValueError("trace is empty (allowed: one arrival or more)")
    if routing not in ROUTING:
        raise ValueError(f"routing={routing!r} is not one of {', '.join(ROUTING)}")
    if not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas={replicas!r} is out of range (allowed: 1 or more)")
    if not 0 <= overhead < float("inf"):
        raise ValueError(f"overhead={overhead} is out of range (allowed: 0 seconds or more)")
    if wrong := set(how) - HOW:
        raise ValueError(f"simulate: unknown {sorted(wrong)} (allowed: {', '.join(sorted(HOW))})")
    shape = geometry.find(model) if isinstance(model, str) else model
    kind = hardware.find(device) if isinstance(device, str) else device
    chosen = strategy or Strategy()
    block = block_bytes(shape, chosen, block_size)
    plain = all(format_of(chosen, block_size, one.key_dim, one.value_dim).coding is None for one in shape.layers if one.kv_heads)
    if kv_memory is None:
        room = int(kind.capacity(devices) * (1 - RESERVE)) - geometry.weight_bytes(shape, weight_bits)
    else:
        room = parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory
    if not block:
        raise ValueError(f"{shape.name} has no KV cache, so there is nothing to page")
    if room < block:
        raise ValueError(
            f"{geometry.text(room)} are left for the cache, less than a block of {geometry.text(round(block))}: more devices, or fewer bits a weight"
        )
    if isinstance(chosen.keep, Window):
        how, prefix_caching = how | {"window": chosen.keep.size + 1, "sinks": chosen.keep.sinks}, False
    how = how | {"partial": plain}
    seen = chosen.keep.size + chosen.keep.sinks + 1 if isinstance(chosen.keep, Window) else None
    engines = [_Replica(int(room // block), block_size, prefix_caching, how, policy) for _ in range(replicas)]
    timing = clock or Roofline(shape, kind, block / block_size, devices, weight_bits, overhead, seen)
    return _Run(trace, engines, routing, timing).run()


class _Run:
    def __init__(self, trace: Sequence[Arrival], engines: list[_Replica], routing: str, clock: Clock) -> None:
        self.trace, self.engines, self.routing, self.clock = sorted(trace, key=lambda one: one.time), engines, routing, clock
        self.refused: dict[str, int] = {}
        self.requests: list[Request] = []
        self.new = fresh_tokens()
        self.computed = self.together = 0
        self.usage: list[tuple[float, float]] = []

    def run(self) -> Simulated:
        """Whichever engine is furthest behind takes the next step; arrivals are handed out when their time has come."""
        following = 0
        busy: list[tuple[float, int]] = []
        while following < len(self.trace) or busy:
            if busy and (following >= len(self.trace) or busy[0][0] < self.trace[following].time):
                now, number = heapq.heappop(busy)
                engine = self.engines[number]
                self._step(engine, now)
                if engine.scheduler.busy:
                    heapq.heappush(busy, (engine.now, number))
                continue
            arrival = self.trace[following]
            number = self._route(arrival, following)
            following += 1
            engine = self.engines[number]
            idle = not engine.scheduler.busy
            request = Request(str(following), arrival.prompt, Sampling(max_new_tokens=arrival.new), arrival.time)
            try:
                engine.scheduler.add(request)
            except ValueError as error:
                reason = "too long for the pool" if "needs up to" in str(error) else str(error)
                self.refused[reason] = self.refused.get(reason, 0) + 1
                continue
            self.requests.append(request)
            if idle:
                engine.now = max(engine.now, arrival.time)
                heapq.heappush(busy, (engine.now, number))
        return self._told()

    def _step(self, engine: _Replica, now: float) -> None:
        plan = engine.scheduler.plan(now)
        engine.now = now + self.clock(plan)
        self.computed += plan.tokens
        self.together = max(self.together, len(engine.scheduler.running))
        engine.scheduler.done(plan, {work.request.id: next(self.new) for work in plan.work if work.makes}, engine.now)
        self.usage.append((engine.now, engine.pool.usage))

    def _route(self, arrival: Arrival, turn: int) -> int:
        if self.routing == "round robin" or len(self.engines) == 1:
            return turn % len(self.engines)
        load = [len(engine.scheduler.requests) for engine in self.engines]
        known = [engine.tree.match(arrival.prompt).tokens if engine.tree is not None else 0 for engine in self.engines]
        near = [
            number for number in range(len(self.engines)) if load[number] <= 1.5 * min(load) + 4
        ]  # knowing the text is not worth any queue
        return max(near, key=lambda number: (known[number], -load[number], -self.engines[number].pool.used))

    def _told(self) -> Simulated:
        served = [request for request in self.requests if request.times]
        if not served:
            raise ValueError(f"no request could be served: {self.refused}")
        first = sorted(request.times[0] - request.arrival for request in served)
        between = [later - sooner for request in served for sooner, later in zip(request.times, request.times[1:], strict=False)]
        begin, end = self.trace[0].time, max(request.times[-1] for request in served)
        made = sum(len(request.output) for request in served)
        mean = statistics.fmean(share for _, share in self.usage)
        return Simulated(
            len(served), self.refused, end - begin, made / max(end - begin, 1e-12), statistics.median(first), first[min(len(first) - 1, int(0.95 * len(first)))],
            statistics.median(between) if between else 0.0, sum(len(request.prompt) for request in served), self.computed,
            sum(request.cached for request in served), made, sum(engine.scheduler.preempted for engine in self.engines), self.together, mean, tuple(self.usage),
        )  # fmt: skip


def block_bytes(shape: Geometry, strategy: Strategy, block_size: int) -> float:
    """Bytes of one block of ``block_size`` tokens in 16 bits or in codes, all layers. Raises ``ValueError`` for a strategy that cannot be paged."""
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size={block_size!r} is out of range (allowed: 1 or more)")
    return sum(
        layer.kv_heads
        * format_of(strategy, block_size, layer.key_dim, layer.value_dim).bytes(block_size, layer.key_dim, layer.value_dim, 2)
        for layer in shape.layers
        if layer.kv_heads
    )
