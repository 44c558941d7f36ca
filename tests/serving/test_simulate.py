"""The simulator runs the engine's own scheduler: a trace takes the same steps there and here, and its clock is arithmetic."""

from typing import Any

import pytest

from kvlab import Strategy, geometry, hardware, keep, store
from kvlab.lab import Lab
from kvlab.serving import Engine, Request, Sampling, Work, traces
from kvlab.serving.clocks import Fitted, Roofline, calibrate, fit
from kvlab.serving.reservation import reserve
from kvlab.serving.scheduler import Plan
from kvlab.serving.served import run_trace
from kvlab.serving.simulate import block_bytes, simulate
from kvlab.serving.traces import Arrival
from tests.panels.conftest import Characters

MODEL, CARD = "Llama-3.1-8B", "H100 SXM 80GB"


def test_a_request_alone_by_hand():
    """A prompt of 1,000 tokens and 3 new ones: bound by computing once, then twice by memory."""
    shape, kind = geometry.find(MODEL), hardware.find(CARD)
    made = simulate([Arrival(5.0, tuple(range(3, 1003)), 3)], MODEL, CARD, token_budget=2048)
    weights = geometry.weight_bytes(shape) - 2 * 128256 * 4096
    one = 4 * 32 * 32 * 128
    prompt = max((2 * shape.active_parameters * 1000 + one * 1000 * 500) / kind.flops, (weights + 1000 * 131072) / kind.bandwidth)
    steps = [(weights + (1000 + number) * 131072) / kind.bandwidth for number in (1, 2)]
    assert made.first_token == pytest.approx(prompt, rel=1e-6) and made.seconds == pytest.approx(prompt + sum(steps), rel=1e-6)
    assert (made.served, made.made, made.computed, made.together) == (1, 3, 1002, 1)
    assert made.throughput == pytest.approx(3 / made.seconds) and made.label == "predicted"


def test_blocks_by_hand():
    shape = geometry.find(MODEL)
    assert block_bytes(shape, Strategy(), 16) == 16 * 131072
    assert block_bytes(shape, Strategy(store=store.Int(bits=8)), 16) == 32 * 8 * (16 * 256 + 4 * 128 + 4 * 16 * 2)
    assert block_bytes(shape, Strategy(store=store.Fp8()), 16) == 32 * 8 * (16 * 256 + 2 * 16 * 2)


def test_the_engine_takes_the_same_steps(llama: Any):
    """All requests there from the start: the same plans, so the same tokens computed, cached, preempted and the same share of blocks after each step."""
    lab = Lab("tiny", llama, Characters())  # type: ignore[arg-type]
    trace = [
        Arrival(0.0, one.prompt, one.new) for one in traces.shared_prompt(12, prefix=40, suffix=9, answer=20, words=97, tenants=2)
    ]
    how = {"token_budget": 64, "max_running": 5, "block_size": 8}
    engine = Engine(lab, kv_memory=30 * 12288 // 2, **how)
    requests = [engine.add(one.prompt, Sampling(max_new_tokens=one.new, ignore_eos=True)) for one in trace]
    usage = []
    while engine.busy:
        engine.step()
        usage.append(engine.pool.usage)
    room = engine.pool.blocks * block_bytes(lab.geometry, Strategy(), 8)
    made = simulate(trace, lab.geometry, CARD, kv_memory=int(room), clock=lambda plan: 1.0, **how)
    found = engine.metrics()
    assert [moment.usage for moment in made.moments] == usage and len(usage) == found.steps == made.seconds
    assert (made.computed, made.cached, made.preemptions) == (found.tokens_computed, found.cached_tokens, found.preemptions)
    assert made.cached == sum(request.cached for request in requests) > 0


def test_a_fitted_clock_finds_what_it_was_made_of():
    true = Fitted(0.02, 0.003, 0.001, 1e-6)
    a, b = Request("a", tuple(range(500))), Request("b", tuple(range(500)))
    works = [[(a, 0, 10)], [(a, 10, 200)], [(a, 210, 1)], [(a, 300, 50), (b, 0, 7)], [(a, 350, 1), (b, 7, 1)]]
    plans = [Plan([Work(*work) for work in some]) for some in works]
    seen = [(len(plan.work), plan.tokens, sum(work.start + work.count for work in plan.work), true(plan)) for plan in plans]
    made = fit(seen)
    assert (made.step, made.request, made.token, made.read) == pytest.approx((0.02, 0.003, 0.001, 1e-6), rel=1e-6)
    assert fit([(1, tokens, 0, 0.5 - 0.001 * tokens) for tokens in (1, 2, 3, 4)]).token == 0.0  # never below nothing
    with pytest.raises(ValueError, match="2 steps are too few"):
        fit(seen[:2])


class Clock:
    """An engine's time, which passes a millisecond whenever somebody looks, and as much as one waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_trace_is_served_in_its_own_time(llama: Any):
    """Two requests at the start, one long after: what was asked, when, and where each ends."""
    lab = Lab("tiny", llama, Characters())  # type: ignore[arg-type]
    clock = Clock()
    engine = Engine(lab, kv_memory="1 MB", block_size=8, clock=clock)
    trace = [
        Arrival(3.0, (5, 6, 7), 4, most=50),
        Arrival(3.0, (9,) * 12, 3),
        Arrival(103.0, (5, 6, 8), 2),
        Arrival(104.0, (5,) * 999, 2),
    ]
    made = run_trace(engine, trace, wait=clock.wait)
    assert [len(request.output) for request in made.requests] == [4, 3, 2] and not engine.busy
    assert [request.reason for request in made.requests] == ["stop", "length", "length"]
    assert (made.served, made.made, made.computed, made.together, made.label) == (3, 9, 6 + 14 + 4, 2, "measured")
    (said,) = made.refused
    assert "more than the model's context" in said
    assert 100.0 < made.seconds < 100.5 and made.requests[2].arrival == pytest.approx(100.0, abs=0.1)
    assert all(0 < request.times[0] - request.arrival < 0.1 for request in made.requests)
    first = made.moments[0]  # 3 tokens of 8, 12 of 16
    assert (first.held, first.filled, first.tokens, first.read, first.running) == (24, 15, 15, 15, 2)
    engine.add([5], Sampling(max_new_tokens=2))
    with pytest.raises(ValueError, match="requests of its own"):
        run_trace(engine, trace)
    with pytest.raises(ValueError, match="trace is empty"):
        run_trace(engine, [])


def test_worst_case_reservation_holds_what_nobody_fills():
    """Ten blocks of 8; prompts of 8 that stop after 8, and might have made 32: two fit if all is reserved, five (two blocks each) if not, and none of them must make room."""
    trace = [Arrival(0.0, tuple(range(number, number + 8)), 8, most=32) for number in range(0, 160, 8)]
    how: Any = {"kv_memory": (10 * 8 * 131072), "block_size": 8, "prefix_caching": False, "clock": lambda plan: 1.0}
    worst, paged = (simulate(trace, MODEL, CARD, reserve=reserve, **how) for reserve in ("worst", "blocks"))
    assert (worst.together, worst.concurrent) == (2, 2.0) and worst.served == paged.served == 20
    assert (paged.together, paged.concurrent, paged.preemptions) == (5, 5.0, 0)
    assert worst.waste > 0.6 > 0.4 > paged.waste
    assert all(len(request.output) == 8 for request in worst.requests)


def test_what_is_set_aside_by_hand():
    """Lengths of 20 and 40, a limit of 100, blocks of 16: 2 and 3 blocks, or 7 each."""
    made, token = reserve(MODEL, [20, 40], 100), 131072
    assert (made.filled, made.blocks, made.worst) == (60 * token, 80 * token, 224 * token)
    assert made.waste == 0.25 and made.worst_waste == pytest.approx(1 - 60 / 224)


def test_who_made_room_finds_its_own_again_and_that_is_no_hit():
    """Chats that share nothing: however often they are read again, nothing was known from before."""
    made = simulate(traces.chat(20, rate=50), MODEL, "A10 24GB", kv_memory="300 MB")
    assert made.preemptions > 0 and made.cached == 0


def test_a_clock_is_calibrated_on_this_machine(llama: Any):
    lab = Lab("tiny", llama, Characters())  # type: ignore[arg-type]
    made = calibrate(lab, most=4, tokens=64, new=4, kv_memory="8 MB", block_size=8)
    assert made.step + made.request + made.token > 0
    one = Plan([Work(Request("a", tuple(range(64))), 0, 64)])
    assert 1e-4 < made(one) < 5.0


def test_roofline_of_a_mixed_step():
    shape, kind = geometry.find(MODEL), hardware.find(CARD)
    a, b = Request("a", tuple(range(100))), Request("b", tuple(range(100)))
    clock = Roofline(shape, kind, 131072.0, overhead=0.5)
    plan = Plan([Work(a, 0, 64), Work(b, 99, 1)])
    read = geometry.weight_bytes(shape) - 2 * 128256 * 4096 + 164 * 131072
    flops = 2 * shape.active_parameters * 65 + 4 * 32 * 32 * 128 * (64 * 32 + 99.5)
    assert clock(plan) == pytest.approx(0.5 + max(read / kind.bandwidth, flops / kind.flops))


def test_sharing_and_routing():
    """Eight tenants with a long prompt each, two replicas with room for five of the prompts: who goes where decides what is found again."""
    trace = traces.shared_prompt(80, prefix=800, suffix=20, answer=10, tenants=8, rate=5)
    room = int(5 * 900 / 16) * block_bytes(geometry.find(MODEL), Strategy(), 16)
    hits = {}
    for routing in ("round robin", "prefix"):
        hits[routing] = simulate(trace, MODEL, CARD, kv_memory=int(room), replicas=2, routing=routing).hit_rate
    assert hits["prefix"] > 0.8
    none = simulate(trace, MODEL, CARD, kv_memory=int(room), replicas=2, prefix_caching=False)
    assert (
        none.cached == 0
        and none.computed > 4 * simulate(trace, MODEL, CARD, kv_memory=int(room), replicas=2, routing="prefix").computed
    )


def test_chunks_in_changing_order_meet_only_at_the_head():
    loose, ordered = (simulate(traces.rag(60, ordered=ordered), MODEL, CARD) for ordered in (False, True))
    assert ordered.cached > 1.3 * loose.cached and loose.cached >= 59 * 192


def test_conversations_find_what_was_said():
    made = simulate(traces.turns(5, count=4), MODEL, CARD)
    assert made.hit_rate > 0.5
    assert simulate(traces.tools(3), MODEL, CARD).hit_rate > 0.6


def test_a_window_bounds_what_a_request_holds():
    trace = [Arrival(0.0, tuple(range(3, 2003)), 50) for _ in range(4)]
    room = 80 * 16 * 131072
    made = simulate(trace, MODEL, CARD, strategy=Strategy(keep=keep.Window(size=124, sinks=4)), kv_memory=room, token_budget=128)
    assert made.served == 4 and made.preemptions == 0


@pytest.mark.parametrize("make", [traces.chat, traces.bursts, traces.shared_prompt, traces.rag, traces.turns, traces.tools])
def test_traces_are_seeded_and_in_order(make: Any):
    one, again, other = make(6, seed=1), make(6, seed=1), make(6, seed=2)
    assert one == again != other and [a.time for a in one] == sorted(a.time for a in one)
    assert all(arrival.prompt and arrival.new >= 1 for arrival in one)


def test_chat_keeps_its_limit():
    trace = traces.chat(300, limit=200)
    assert max(len(one.prompt) + one.new for one in trace) <= 200
    assert 120 < sorted(len(one.prompt) for one in traces.chat(301))[150] < 200


@pytest.mark.parametrize(
    "do, said",
    [
        (lambda: simulate([], MODEL, CARD), "trace is empty"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, routing="random"), "routing='random'"),
        (lambda: simulate(traces.chat(2), "Llama-3.1-70B", CARD, kv_memory="4 GB"), "more devices, or fewer bits a weight"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, kv_memory="1 TB"), "kv_memory='1 TB' is more than the weights leave"),
        (lambda: simulate(traces.chat(2), MODEL, "PCIe 4.0 x16", kv_memory="1 GB"), "is a link"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, clock=lambda plan: 0.0), "the clock gave 0.0 for a step"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, strategy="int8"), "strategy='int8' is no strategy"),  # type: ignore[arg-type]
        (lambda: simulate(traces.chat(2), MODEL, CARD, overhead=None), "overhead=None"),  # type: ignore[arg-type]
        (lambda: reserve(MODEL, [5, 12], 10), "lengths from 5 to 12"),
        (lambda: reserve(MODEL, [], 10), "lengths is empty"),
        (lambda: fit([(1, 1, 1, -1.0)] * 4), "a step of -1.0 seconds"),
        (lambda: traces.tools(0), "agents=0"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, replicas=0), "replicas=0"),
        (lambda: simulate(traces.chat(2), "Llama-3.1-70B", CARD), "more devices, or fewer bits a weight"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, block_size=0), "block_size=0"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, strategy=Strategy(keep=keep.TOVA())), "keep.TOVA cannot be paged"),
        (lambda: simulate(traces.chat(2), MODEL, CARD, kv_memory=16 * 131072), "no request could be served"),
        (lambda: traces.chat(0), "count=0"),
        (lambda: traces.chat(5, limit=1), "limit=1"),
        (lambda: traces.rag(5, chunks=9, library=3), "chunks=9 is more than the library has"),
    ],
)
def test_what_cannot_be_is_said(do: Any, said: str):
    with pytest.raises(ValueError, match=said):
        do()
