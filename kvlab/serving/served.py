"""Served: what came of a trace, in the same words whether an engine served it (measured) or the simulator (predicted)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvlab.serving.request import FINISHED, Request, Sampling
from kvlab.serving.traces import Arrival

if TYPE_CHECKING:
    from kvlab.serving.engine import Engine
    from kvlab.serving.scheduler import Plan, Scheduler

QUEUED = 0.2  # share of the time


@dataclass(frozen=True)
class Moment:
    """After a step: when it ended and how long it took (seconds); the share of all blocks in use; requests that ran and that wait; places of the
    blocks (``held``) of those that go on and the tokens in them (``filled``); tokens that the step computed, and tokens of cache that it read.
    """

    time: float
    seconds: float
    usage: float
    running: int
    waiting: int
    held: int
    filled: int
    tokens: int
    read: int


@dataclass(frozen=True)
class Served:
    """Times in seconds; medians and 95th percentiles over the requests that were served. ``together``: the most requests that ran at once; ``concurrent``: how
    many did on average while others waited (at all times, where others waited for less than a fifth of it). ``kv_usage``: share of the blocks in use, over time; ``waste``: places
    of the running requests' blocks with no token in them, over time. ``label``: "measured" or "predicted".
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
    concurrent: float
    kv_usage: float
    waste: float
    moments: tuple[Moment, ...] = field(repr=False, default=())
    requests: tuple[Request, ...] = field(repr=False, default=())
    label: str = "predicted"

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that the prefix tree had, as a share of all."""
        return self.cached / self.prompt_tokens if self.prompt_tokens else 0.0


class Account:
    """Writes down each step, and adds it up."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def step(self, plan: Plan, scheduler: Scheduler, begun: float, now: float) -> None:
        held = sum(len(request.blocks) - request.blocks.count(-1) for request in scheduler.running) * scheduler.pool.block_size
        filled = sum(request.computed for request in scheduler.running)
        if scheduler.window is not None:
            filled = min(filled, held)
        self.moments.append(
            Moment(
                now,
                now - begun,
                scheduler.pool.usage,
                len(scheduler.running) + sum(work.request.status == FINISHED for work in plan.work),
                len(scheduler.waiting),
                held,
                filled,
                plan.tokens,
                plan.read,
            )
        )

    def told(self, requests: Sequence[Request], refused: Mapping[str, int], begin: float, label: str, preemptions: int) -> Served:
        """Raises ``ValueError`` where nothing was served."""
        served = [request for request in requests if request.times]
        if not served:
            raise ValueError(
                "no request could be served: " + "; ".join(f"{why} ({count} of them)" for why, count in refused.items())
            )
        first = sorted(request.times[0] - request.arrival for request in served)
        between = [later - sooner for one in served for sooner, later in zip(one.times, one.times[1:], strict=False)]
        end = max(request.times[-1] for request in served)
        made = sum(len(request.output) for request in served)
        queued = [moment for moment in self.moments if moment.waiting]
        if sum(moment.seconds for moment in queued) < QUEUED * sum(moment.seconds for moment in self.moments):
            queued = self.moments
        return Served(
            served=len(served),
            refused=dict(refused),
            seconds=end - begin,
            throughput=made / max(end - begin, 1e-12),
            first_token=statistics.median(first),
            first_token_p95=first[min(len(first) - 1, int(0.95 * len(first)))],
            per_token=statistics.median(between) if between else 0.0,
            prompt_tokens=sum(len(request.prompt) for request in served),
            computed=sum(moment.tokens for moment in self.moments),
            cached=sum(request.cached for request in served),
            made=made,
            preemptions=preemptions,
            together=max(moment.running for moment in self.moments),
            concurrent=_mean(queued, lambda moment: moment.running),
            kv_usage=_mean(self.moments, lambda moment: moment.usage),
            waste=1 - _mean(self.moments, lambda moment: moment.filled) / (_mean(self.moments, lambda moment: moment.held) or 1),
            moments=tuple(self.moments),
            requests=tuple(requests),
            label=label,
        )


def run_trace(
    engine: Engine, trace: Sequence[Arrival], *, progress: Callable[[str, int, int], Any] | None = None, wait: Callable[[float], Any] = time.sleep
) -> Served:  # fmt: skip
    """Have an idle engine serve ``trace`` in real time: each request comes when its time has come, and ends with its ``new`` tokens.

    ``progress``: called with a stage, the requests that are finished, and all. ``wait``: what is done with the seconds in which there is nothing to do.
    Raises ``ValueError`` for an empty trace, an engine that is busy, or where nothing could be served; a request that the engine refuses is counted.
    """
    if not trace:
        raise ValueError("trace is empty (allowed: one arrival or more)")
    if engine.busy:
        raise ValueError("the engine has requests of its own, which the measurement would count")
    order, account = sorted(trace, key=lambda one: one.time), Account()
    begin, preempted, following = engine.clock(), engine.scheduler.preempted, 0
    refused: dict[str, int] = {}
    requests: list[Request] = []
    ends: dict[str, int] = {}
    while following < len(order) or engine.busy:
        while following < len(order) and begin + order[following].time - order[0].time <= engine.clock():
            one, following = order[following], following + 1
            try:
                made = engine.add(one.prompt, Sampling(max_new_tokens=one.most or one.new, ignore_eos=True))
            except ValueError as error:
                refused[str(error)] = refused.get(str(error), 0) + 1
                continue
            made.arrival = begin + one.time - order[0].time  # not: when the engine was free to look
            requests.append(made)
            ends[made.id] = one.new
        if not engine.busy:
            if following < len(order):
                wait(max(0.0, begin + order[following].time - order[0].time - engine.clock()))
            continue
        begun = engine.clock()
        engine.step()
        for work in engine.plan.work:
            one_more = work.request
            if one_more.status != FINISHED and len(one_more.output) >= ends[one_more.id]:
                engine.cancel(one_more.id, "stop")
        account.step(engine.plan, engine.scheduler, begun, engine.clock())
        if progress:
            progress("serving", sum(request.status == FINISHED for request in requests), len(order))
    return account.told(requests, refused, begin, "measured", engine.scheduler.preempted - preempted)


def _mean(moments: Sequence[Moment], what: Callable[[Moment], float]) -> float:
    """Over time."""
    whole = sum(moment.seconds for moment in moments)
    if not whole:
        return statistics.fmean(what(moment) for moment in moments)
    return sum(what(moment) * moment.seconds for moment in moments) / whole
