"""Every request gets the tokens that it would get alone, whatever else happens; no block is leaked, written by two, or read before it was written."""

import random

import pytest

from kvlab.serving import BlockPool, PrefixTree, Request, Sampling, Scheduler
from tests.serving.ledger import Failing, Ledger, expected, scheduler_of


def ask(name: str, prompt, new: int = 4, **more) -> Request:
    return Request(name, tuple(prompt), Sampling(max_new_tokens=new), **more)


def run(ledger: Ledger, limit: int = 10_000) -> list[Request]:
    finished = []
    for step in range(limit):
        if not ledger.scheduler.busy:
            return finished
        finished += ledger.step(float(step))
    raise AssertionError("not finished: somebody starves")


def test_a_soak():
    """Arrivals in bursts, shared beginnings of three tenants, cancels, deadlines, forks, blocks too few, and a pool that refuses one time in twenty."""
    dice, soak_requests = random.Random(7), 2000
    for number, how in enumerate(
        (
            {"preempt": "recompute"},
            {"preempt": "swap"},
            {"preempt": "recompute", "policy": "lfu", "token_budget": 24},
            {"preempt": "swap", "tree": False, "max_running": 5},
            {"preempt": "recompute", "reserve": "worst"},
        )
    ):
        pool = Failing(40, 4, dice, 0.05)
        scheduler = scheduler_of(40, 4, pool=pool, **{"token_budget": 48, "max_running": 12} | how)
        ledger, alive, finished, sent, forks = Ledger(scheduler), [], [], 0, 0
        beginnings = [[dice.randrange(7) for _ in range(dice.randrange(4, 40))] for _ in range(6)]
        step = 0
        while sent < soak_requests // 5 or scheduler.busy:
            step += 1
            assert step < 30_000, "somebody starves"
            for _ in range(dice.choice([0, 0, 0, 1, 4]) if sent < soak_requests // 5 else 0):
                start = dice.choice(beginnings)[: dice.randrange(1, 40)] if dice.random() < 0.7 else []
                prompt = [*start, *(dice.randrange(7) for _ in range(dice.randrange(1, 30)))]
                request = ask(
                    f"{number}-{sent}", prompt, dice.randrange(1, 25), salt=dice.choice([None, None, "a", "b"]), arrival=step
                )
                request.deadline = step + dice.randrange(5, 400) if dice.random() < 0.05 else None
                scheduler.add(request)
                alive.append(request)
                sent += 1
            if scheduler.requests and dice.random() < 0.05:
                scheduler.cancel(dice.choice(list(scheduler.requests)), now=step)
            running = [request for request in scheduler.running if not request.output or request.left == 1]
            if running and len(scheduler.running) < scheduler.max_running and dice.random() < 0.03:
                forks += 1
                alive.append(scheduler.fork(dice.choice(running).id, f"{number}-fork-{forks}"))
            finished += ledger.step(step)
        assert pool.refused > 20 and scheduler.preempted + (how.get("reserve") == "worst") > 0
        for request in alive:
            assert request.status == "finished" and not request.blocks
            assert request.output == expected(request)[: len(request.output)]
            assert request.reason in ("length", "cancelled", "deadline") and (
                request.reason != "length" or len(request.output) == request.sampling.max_new_tokens
            )
        assert sum(request.reason == "length" for request in alive) > 0.7 * len(alive)
        assert not ledger.away or {name for name in ledger.away if name in scheduler.requests} == set()
        if scheduler.tree is not None:
            scheduler.tree.clear()
        assert pool.free == pool.blocks


def test_continuous_batching_lets_requests_in_as_others_leave():
    """Four places, eight requests of which every second is long: static batches wait for the longest."""
    steps = {}
    for batching in ("static", "continuous"):
        ledger = Ledger(scheduler_of(200, 4, tree=False, batching=batching, max_running=4))
        for number in range(8):
            ledger.scheduler.add(ask(str(number), [1, 2, 3], 40 if number % 4 == 0 else 4))
        done = run(ledger)
        assert all(request.output == expected(request) for request in done) and len(done) == 8
        steps[batching] = ledger.steps
    assert steps == {
        "static": 80,
        "continuous": 44,
    }  # 2 x 40; the second long one begins at step 5, when three short ones have left


def test_paging_holds_more_than_worst_case_reservation():
    held = {}
    for reserve in ("worst", "blocks"):
        scheduler = scheduler_of(32, 4, tree=False, reserve=reserve)
        for number in range(16):
            scheduler.add(ask(str(number), [1, 2, 3, 4], 60))
        scheduler.plan()
        held[reserve] = len(scheduler.running)
    assert held == {"worst": 2, "blocks": 16}  # 64 tokens each are 16 blocks; a prompt alone is one


def test_a_shared_beginning_is_computed_once():
    ledger = Ledger(scheduler_of(200, 4))
    system = [number % 7 for number in range(40)]
    for number in range(5):
        ledger.scheduler.add(ask(str(number), [*system, number % 7, 3], 2))
        run(ledger)
    first = 42 + 1
    assert ledger.tokens == first + 4 * (2 + 1)  # the others read their own two tokens, and one that they made


def test_prompts_are_read_in_pieces_beside_decode_steps():
    scheduler = scheduler_of(100, 4, tree=False, token_budget=8)
    ledger = Ledger(scheduler)
    scheduler.add(ask("short", [1, 2], 10))
    ledger.step(0)
    scheduler.add(ask("long", list(range(20)), 2))
    plan = scheduler.plan()
    assert [(work.request.id, work.start, work.count) for work in plan.work] == [("short", 2, 1), ("long", 0, 7)]
    scheduler.done(plan, ledger.run(plan))
    run(ledger)


@pytest.mark.parametrize("preempt", ["recompute", "swap"])
def test_the_youngest_makes_room_and_the_oldest_goes_on(preempt):
    scheduler = scheduler_of(6, 4, tree=False, preempt=preempt)
    ledger = Ledger(scheduler)
    old, young = ask("old", [1] * 8, 12), ask("young", [2] * 8, 12)
    scheduler.add(old)
    scheduler.add(young)
    done = run(ledger)
    assert [request.id for request in done] == ["old", "young"] and (old.preemptions, young.preemptions) == (0, 1)
    assert all(request.output == expected(request) for request in done)
    read = 8 + 11 + 8 + 11
    assert ledger.tokens == (read if preempt == "swap" else read + young_read_again(ledger, young))


def young_read_again(ledger: Ledger, young: Request) -> int:
    """What was computed before it lost its blocks: both grew alike until six blocks were full, 12 tokens each."""
    return 12


def test_blocks_that_fell_out_of_a_window_are_given_back():
    scheduler = scheduler_of(8, 4, tree=False, window=8, sinks=2, token_budget=4)
    ledger = Ledger(scheduler)
    scheduler.add(ask("long", [number % 7 for number in range(30)], 40))
    most = 0
    while scheduler.busy:
        ledger.step(0)
        most = max(most, scheduler.pool.used)
    assert most <= 5 and scheduler.pool.free == 8  # a block of sinks, 8 tokens in up to 3 blocks, one being written


def test_a_request_alone_never_waits_for_itself():
    """The pool is just large enough, and a block that is only copied from is in the way."""
    scheduler = scheduler_of(4, 4, token_budget=64)
    ledger = Ledger(scheduler)
    scheduler.add(ask("first", [1, 2, 3, 4, 5, 6, 7, 0], 1))
    run(ledger)
    scheduler.add(ask("second", [1, 2, 3, 0, *[5] * 10], 2))
    (second,) = run(ledger)
    assert second.output == expected(second)


@pytest.mark.parametrize(
    "do, said",
    [
        (
            lambda s: s.add(ask("a", [1] * 17)),
            "needs up to 6 blocks of 4 tokens, the pool has 4 .allowed: prompt and new tokens together up to 16",
        ),
        (lambda s: (s.add(ask("a", [1])), s.add(ask("a", [1]))), "request 'a' is there already"),
        (lambda s: s.cancel("b"), "request 'b' is not there"),
        (lambda s: s.fork("b", "c"), "request 'b' is not running"),
        (lambda s: ask("a", []), "the prompt is empty"),
        (lambda s: Sampling(max_new_tokens=0), "max_new_tokens=0"),
        (lambda s: Sampling(temperature=-1), "temperature=-1"),
        (lambda s: Sampling(top_p=0), "top_p=0"),
        (lambda s: Sampling(stop=("",)), "one character or more"),
        (lambda s: Scheduler(s.pool, batching="dynamic"), "batching='dynamic' is not one of continuous, static"),
        (lambda s: Scheduler(s.pool, token_budget=0), "token_budget=0"),
        (lambda s: Scheduler(s.pool, PrefixTree(s.pool), window=8), "take one of the two"),
        (lambda s: Scheduler(BlockPool(2), PrefixTree(s.pool)), "another pool"),
    ],
)
def test_what_cannot_be_is_said(do, said):
    with pytest.raises(ValueError, match=said):
        do(scheduler_of(4, 4))


def test_a_finished_request_is_gone_and_a_missing_token_is_said():
    scheduler = scheduler_of(4, 4)
    scheduler.add(ask("a", [1, 2], 1))
    plan = scheduler.plan()
    with pytest.raises(ValueError, match="the step makes a token, and none is given"):
        scheduler.done(plan, {})
    scheduler.cancel("a")
    assert scheduler.done(plan, {}) == [] and not scheduler.busy
    with pytest.raises(ValueError, match="finished or cancelled"):
        scheduler.cancel("a")
