"""simulate: the same pool, tree and scheduler as the engine's, on a clock that is worked out instead of waited for.

    simulate(traces.chat(1000), "Llama-3.1-70B", "H100 SXM 80GB", devices=8)

For what does not fit here: large models, thousands of requests, several replicas. Everything is predicted, and says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from kvlab import geometry, hardware
from kvlab.geometry import Geometry
from kvlab.hardware import Hardware
from kvlab.keep.window import Window
from kvlab.serving.block_pool import BlockPool, memory_of
from kvlab.serving.clocks import Clock, Roofline
from kvlab.serving.pages import format_of, strategy_of
from kvlab.serving.prefix_tree import PrefixTree
from kvlab.serving.request import Request, Sampling
from kvlab.serving.scheduler import Scheduler
from kvlab.serving.served import Account, Served
from kvlab.serving.traces import Arrival, fresh_tokens
from kvlab.strategy import Strategy

ROUTING = ("round robin", "prefix")
HOW = {"batching", "reserve", "token_budget", "max_running", "preempt"}
RESERVE = 0.1  # of the devices' memory, for everything but weights and blocks


class _Replica:
    def __init__(self, blocks: int, block_size: int, prefix: bool, how: dict[str, Any], policy: str) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.tree = PrefixTree(self.pool, policy) if prefix else None
        self.scheduler = Scheduler(self.pool, self.tree, **how)
        self.now = 0.0


def simulate(
    trace: Sequence[Arrival], model: str | Geometry, device: str | Hardware, *, strategy: Strategy | None = None, devices: int = 1, weight_bits: int = 16,
    kv_memory: int | str | None = None, block_size: int = 16, prefix_caching: bool = True, policy: str = "lru", replicas: int = 1, routing: str = "round robin",
    clock: Clock | None = None, overhead: float = 0.0, progress: Callable[[int, int], Any] | None = None, **how: Any,
) -> Served:  # fmt: skip
    """Serve ``trace`` as an engine would.

    Args:
        strategy: what goes into the blocks, as for :class:`Engine`. kv_memory: bytes of all blocks of a replica; None: what weights leave of the devices.
        replicas: so many engines, each with ``devices`` devices. routing: "round robin", or "prefix": to the one whose tree knows most of the prompt, unless
            it has far more to do than another.
        clock: seconds of a step from its plan; None: the roofline, ``overhead`` seconds added to each step.
        progress: called now and then with the requests that have come, and all.
        how: batching, reserve, token_budget, max_running, preempt, as for :class:`Scheduler`.

    Raises ``ValueError`` for an empty trace, a model that does not fit, unknown names, or a strategy that cannot be paged.
    """
    if not trace:
        raise ValueError("trace is empty (allowed: one arrival or more)")
    if routing not in ROUTING:
        raise ValueError(f"routing={routing!r} is not one of {', '.join(ROUTING)}")
    if not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"replicas={replicas!r} is out of range (allowed: 1 or more)")
    if not isinstance(overhead, int | float) or not 0 <= overhead < float("inf"):
        raise ValueError(f"overhead={overhead} is out of range (allowed: 0 seconds or more)")
    if wrong := set(how) - HOW:
        raise ValueError(f"simulate: unknown {sorted(wrong)} (allowed: {', '.join(sorted(HOW))})")
    shape = geometry.find(model) if isinstance(model, str) else model
    kind = hardware.find(device) if isinstance(device, str) else device
    chosen = strategy_of(strategy)
    block = block_bytes(shape, chosen, block_size)
    plain = all(format_of(chosen, block_size, one.key_dim, one.value_dim).coding is None for one in shape.layers if one.kv_heads)
    left = int(kind.capacity(devices) * (1 - RESERVE)) - (geometry.weight_bytes(shape, weight_bits) if shape.parameters else 0)
    room = left if kv_memory is None else memory_of(kv_memory)
    if not block:
        raise ValueError(f"{shape.name} has no KV cache, so there is nothing to page")
    if block <= left < room:
        raise ValueError(
            f"kv_memory={kv_memory!r} is more than the weights leave (allowed: up to {geometry.text(left)} on {devices} x {kind.name})"
        )
    if left < 0:
        raise ValueError(
            f"the weights of {shape.name} need {geometry.text(-left)} more than {devices} x {kind.name} give: more devices, or fewer bits a weight"
        )
    if min(left, room) < block:
        raise ValueError(
            f"{geometry.text(min(left, room))} are left for the cache, less than a block of {geometry.text(round(block))}: more devices, or fewer bits a weight"
        )
    if isinstance(chosen.keep, Window):
        how, prefix_caching = how | {"window": chosen.keep.size + 1, "sinks": chosen.keep.sinks}, False
    how = how | {"partial": plain}
    seen = chosen.keep.size + chosen.keep.sinks + 1 if isinstance(chosen.keep, Window) else None
    engines = [_Replica(int(room // block), block_size, prefix_caching, how, policy) for _ in range(replicas)]
    timing = clock or Roofline(shape, kind, block / block_size, devices, weight_bits, overhead, seen)
    return _Run(trace, engines, routing, timing, progress).run()


class _Run:
    def __init__(
        self,
        trace: Sequence[Arrival],
        engines: list[_Replica],
        routing: str,
        clock: Clock,
        progress: Callable[[int, int], Any] | None = None,
    ) -> None:
        self.progress = progress
        self.trace, self.engines, self.routing, self.clock = sorted(trace, key=lambda one: one.time), engines, routing, clock
        self.refused: dict[str, int] = {}
        self.requests: list[Request] = []
        self.new = fresh_tokens()
        self.ends: dict[str, int] = {}  # after so many new tokens a request stops, whatever it might have made
        self.account = Account()

    def run(self) -> Served:
        """Whichever engine is furthest behind takes the next step; arrivals are handed out when their time has come."""
        following = 0
        busy: list[tuple[float, int]] = []
        while following < len(self.trace) or busy:
            if busy and (following >= len(self.trace) or busy[0][0] < self.trace[following].time):
                now, number = heapq.heappop(busy)
                engine = self.engines[number]
                self._step(engine, now)
                if self.progress and len(self.account.moments) % 64 == 0:
                    self.progress(following, len(self.trace))
                if engine.scheduler.busy:
                    heapq.heappush(busy, (engine.now, number))
                continue
            arrival = self.trace[following]
            number = self._route(arrival, following)
            following += 1
            engine = self.engines[number]
            idle = not engine.scheduler.busy
            sampling = Sampling(max_new_tokens=arrival.most or arrival.new)
            request = Request(str(following), arrival.prompt, sampling, arrival.time)
            self.ends[request.id] = arrival.new
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
        preempted = sum(engine.scheduler.preempted for engine in self.engines)
        return self.account.told(self.requests, self.refused, self.trace[0].time, "predicted", preempted)

    def _step(self, engine: _Replica, now: float) -> None:
        plan = engine.scheduler.plan(now)
        seconds = self.clock(plan)
        if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
            raise ValueError(f"the clock gave {seconds!r} for a step of {plan.tokens} tokens (allowed: seconds above 0)")
        engine.now = now + seconds
        made, stop = {}, {}
        for work in plan.work:
            if work.makes:
                name = work.request.id
                made[name] = next(self.new)
                if len(work.request.output) + 1 >= self.ends[name]:
                    stop[name] = "stop"
        engine.scheduler.done(plan, made, engine.now, stop=stop)
        self.account.step(plan, engine.scheduler, now, engine.now)

    def _route(self, arrival: Arrival, turn: int) -> int:
        if self.routing == "round robin" or len(self.engines) == 1:
            return turn % len(self.engines)
        load = [len(engine.scheduler.requests) for engine in self.engines]
        known = [engine.tree.match(arrival.prompt).tokens if engine.tree is not None else 0 for engine in self.engines]
        near = [
            number for number in range(len(self.engines)) if load[number] <= 1.5 * min(load) + 4
        ]  # knowing the text is not worth any queue
        return max(near, key=lambda number: (known[number], -load[number], -self.engines[number].pool.used))


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
