"""What an engine says is what each request would be told alone, whatever joins, leaves, is shared or makes room; of codes, what their own unshared run says."""

import random
from typing import Any

import pytest
import torch

from kvlab import Strategy, keep, place, store
from kvlab.lab import Lab
from kvlab.serving import Engine, Sampling
from tests import zoo
from tests.panels.conftest import Characters

TEXT = "The quick brown fox jumps over the lazy dog, again and again and again; all day and all night it jumps, and nobody knows why it does."
STORES = [store.Dense(), store.Int(bits=8, group_size=8), store.Int(bits=4, group_size=8, key_axis="token"), store.Fp8()]


@pytest.fixture(scope="module")
def lab(llama: Any) -> Lab:
    return Lab("tiny", llama, Characters())  # type: ignore[arg-type]


def alone(lab: Lab, ids: list[int], new: int) -> list[int]:
    """transformers' own greedy tokens."""
    from kvlab.attention import attach, detach

    detach(lab.model)
    made = lab.model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
    attach(lab.model)
    return made[0, len(ids) :].tolist()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    ids = Characters().encode(TEXT)
    shared = [ids[:40], ids[:70], ids[30:60]]
    return [
        [*dice.choice(shared)[: dice.randrange(1, 71)], *(dice.randrange(3, 97) for _ in range(dice.randrange(1, 30)))]
        for _ in range(count)
    ]


GREEDY = {"ignore_eos": True}


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3"])
def test_dense_pages_say_what_the_model_says(family: str) -> None:
    """Sliding windows, soft caps and sinks of the model's own included."""
    lab = Lab(family, zoo.model(family), Characters())  # type: ignore[arg-type]
    engine = Engine(lab, kv_memory="1 MB", block_size=8, token_budget=40, max_running=4)
    asked = prompts(6)
    made = engine.generate(asked, Sampling(max_new_tokens=9, **GREEDY))
    assert [list(one.tokens) for one in made] == [alone(lab, ids, 9) for ids in asked]
    assert engine.tree is not None and any(one.cached for one in made)


@pytest.mark.parametrize(
    "how", [{"preempt": "recompute"}, {"preempt": "swap"}, {"batching": "static"}, {"prefix_caching": False}], ids=str
)
def test_any_mix_says_the_same(lab: Lab, how: dict[str, Any]) -> None:
    """Arrivals between steps, cancels, too few blocks, shared beginnings."""
    dice = random.Random(3)
    engine = Engine(lab, kv_memory=26 * 8 * 2 * 3 * 2 * 16 * 4, block_size=8, token_budget=32, max_running=6, **how)
    todo, alive, finished = prompts(20, 5), {}, {}
    while todo or engine.busy:
        for _ in range(min(len(todo), dice.choice([0, 0, 1, 3]))):
            ids = todo.pop()
            request = engine.add(ids, Sampling(max_new_tokens=dice.randrange(1, 16), **GREEDY), salt=dice.choice([None, "a"]))
            alive[request.id] = (ids, request)
        if engine.busy and dice.random() < 0.04:
            engine.cancel(dice.choice(list(engine.scheduler.requests)))
        finished |= {one.id: one for one in engine.step()}
    assert (engine.scheduler.preempted > 0) == (how.get("batching") != "static")
    for ids, request in alive.values():
        assert request.output == alone(lab, ids, request.sampling.max_new_tokens)[: len(request.output)]
        assert request.reason == "cancelled" or len(request.output) == request.sampling.max_new_tokens
    if engine.tree is not None:
        engine.tree.clear()
    assert engine.pool.free == engine.pool.blocks and not engine._away


@pytest.mark.many
@pytest.mark.parametrize("kind", STORES[1:], ids=str)
def test_codes_say_what_their_own_unshared_run_says(lab: Lab, kind: Any) -> None:
    """One request at a time, nothing shared, one token a step; then all at once, in pieces, shared and preempted."""
    strategy, sampling = Strategy(store=kind), Sampling(max_new_tokens=10, **GREEDY)
    asked = prompts(10, 1)
    single = Engine(lab, strategy, kv_memory="1 MB", block_size=8, prefix_caching=False, max_running=1, token_budget=1)
    want = [list(single.generate([ids], sampling)[0].tokens) for ids in asked]
    size = single.block_bytes
    for how in ({}, {"kv_memory": int(26 * size), "preempt": "swap"}, {"kv_memory": int(26 * size)}):
        engine = Engine(lab, strategy, **({"kv_memory": "1 MB", "block_size": 8, "token_budget": 48} | how))
        made = engine.generate(asked, sampling)
        assert [list(one.tokens) for one in made] == want
        assert how or any(one.cached for one in made)
        assert not how or engine.scheduler.preempted


def test_bytes_of_blocks_by_hand(lab: Lab) -> None:
    """3 layers, 2 heads, 16 numbers: dense 4 bytes each; 8 bits with a scale and a zero of 2 bytes for each channel of keys and each 8 numbers of values."""
    room = "1 MB"
    dense, int8 = Engine(lab, kv_memory=room, block_size=8), Engine(lab, Strategy(store=STORES[1]), kv_memory=room, block_size=8)
    assert dense.block_bytes == 3 * 2 * 8 * 2 * 16 * 4 and dense.pool.blocks == 1_000_000 // dense.block_bytes
    assert int8.block_bytes == 3 * 2 * (8 * 2 * 16 + 4 * 16 + 4 * 8 * 2)
    for engine in (dense, int8):
        assert engine.cache.bytes == engine.pool.blocks * engine.block_bytes


def test_a_window_gives_blocks_back_and_sees_what_is_left(lab: Lab) -> None:
    """Against the same window in one block of its own, which gives nothing back."""
    strategy = Strategy(keep=keep.Window(size=20, sinks=4))
    small = Engine(lab, strategy, kv_memory="1 MB", block_size=4, token_budget=16)
    wide = Engine(lab, strategy, kv_memory="4 MB", block_size=256)
    asked = prompts(4, 2)
    sampling = Sampling(max_new_tokens=40, **GREEDY)
    made = [[list(one.tokens) for one in engine.generate(asked, sampling)] for engine in (small, wide)]
    assert made[0] == made[1] and small.tree is None and small.pool.free == small.pool.blocks
    request = small.add(asked[0], sampling)
    most = 0
    while small.busy:
        small.step()
        most = max(most, small.pool.used)
    assert most <= (20 + 16) // 4 + 3 and len(request.output) == 40


def test_streams_stop_texts_and_sampling(lab: Lab) -> None:
    engine = Engine(lab, kv_memory="1 MB")
    whole = engine.generate([TEXT[:40]], Sampling(max_new_tokens=30, **GREEDY))[0]
    assert len(whole.text) == 30
    stop = whole.text[12:15]
    at = whole.text.find(stop)
    request = engine.add(TEXT[:40], Sampling(max_new_tokens=30, stop=(stop, "not there"), **GREEDY))
    other = engine.add(TEXT[:20], Sampling(max_new_tokens=5, **GREEDY))
    pieces = list(engine.stream(request.id))
    assert "".join(pieces) == whole.text[:at] and request.reason == "stop" and len(pieces) > 1 and other.output
    warm = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    first, again, third = (engine.generate([TEXT[:40], TEXT[:9]], Sampling(seed=seed, **warm))[0].tokens for seed in (1, 1, 2))
    assert first == again != third
    assert (
        engine.generate([TEXT[:40]], Sampling(seed=5, top_p=1e-6, **warm))[0].tokens == whole.tokens[:12]
    )  # nothing but the likeliest is left
    with pytest.raises(ValueError, match="request 'x' is not there"):
        next(engine.stream("x"))


def test_metrics_add_up(lab: Lab) -> None:
    engine = Engine(lab, kv_memory="1 MB", block_size=8)
    system = Characters().encode(TEXT)[:64]
    sampling = Sampling(max_new_tokens=4, **GREEDY)
    for number in range(5):
        engine.generate([[*system, number + 3, 9]], sampling)
    made = engine.metrics()
    assert (made.finished, made.running, made.waiting, made.tokens_made) == (5, 0, 0, 20)
    assert made.tokens_computed == 66 + 3 + 4 * (2 + 3) and made.prefix_hit_rate == pytest.approx(4 * 64 / (5 * 66))
    assert 0 < made.busy <= 1 and made.throughput > 0 and made.first_token > 0 and made.per_token > 0
    request = engine.add(system[:13], sampling)
    engine.step()
    assert engine.metrics().fragmentation == pytest.approx(1 - 13 / 16)
    engine.cancel(request.id)
    assert engine.metrics().finished == 6


@pytest.mark.parametrize(
    "strategy, said",
    [
        (Strategy(keep=keep.HeavyHitter(budget=100)), "keep.HeavyHitter cannot be paged: it drops single tokens"),
        (Strategy(store=store.KIVI(group_size=8)), "store.KIVI cannot be paged .allowed: Dense, Int with 8 or 4 bits, Fp8"),
        (Strategy(store=store.Int(bits=2, group_size=8)), "store.Int cannot be paged"),
        (Strategy(store=store.Int(group_size=8, residual=32)), "residual=32"),
        (Strategy(store=store.Int(group_size=8, key_axis="tensor")), "key_axis='tensor'"),
        (Strategy(place=place.Offload()), "whole requests are put away instead"),
        (Strategy(keep=keep.Window(size=8, positions="cache")), "positions='cache' cannot be paged"),
    ],
)
def test_what_cannot_be_paged_is_said(lab: Lab, strategy: Strategy, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engine(lab, strategy)


def test_bad_requests_are_said_and_change_nothing(lab: Lab) -> None:
    engine = Engine(lab, kv_memory=4 * 16 * 2 * 3 * 2 * 16 * 4)
    for prompt, more, said in (
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5, 97], {}, "97 is no token of this model"),
        ([5] * 500, {}, "more than the model's context .allowed: 512 together"),
        ([5] * 60, {}, "needs up to 8 blocks of 16 tokens, the pool has 4"),
        ([5], {"id": "a"}, "request 'a' is there already"),
    ):
        if "id" in more:
            engine.add([5], Sampling(max_new_tokens=4), id="a")
        with pytest.raises(ValueError, match=said):
            engine.add(prompt, **more)
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate([[5, 6], []], Sampling(max_new_tokens=4))
    assert list(engine.scheduler.requests) == ["a"]
    engine.cancel("a")
    with pytest.raises(ValueError, match="request 'a' is not there"):
        engine.cancel("a")
    with pytest.raises(ValueError, match="less than one block of 16 tokens .allowed: 12,288 bytes or more"):
        Engine(lab, kv_memory=100)
    with pytest.raises(ValueError, match="block_size=0"):
        Engine(lab, block_size=0)


def test_a_deadline_ends_a_request(lab: Lab) -> None:
    now = [0.0]
    engine = Engine(lab, kv_memory="1 MB", clock=lambda: now[0])
    late, other = (
        engine.add([5, 6], Sampling(max_new_tokens=50, **GREEDY), deadline=3.0),
        engine.add([7], Sampling(max_new_tokens=6, **GREEDY)),
    )
    found = []
    while engine.busy:
        found += engine.step()
        now[0] += 1.0
    assert [(one.id, one.reason) for one in found] == [(late.id, "deadline"), (other.id, "length")]
    assert 3 <= len(found[0].tokens) <= 5


def test_one_bad_request_disturbs_nobody(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(lab, kv_memory="1 MB", block_size=8)
    for said, more in (
        ("salt=.'x'. cannot tell tenants apart", {"salt": ["x"]}),
        ("deadline nan is no time", {"deadline": float("nan")}),
        ("seed=-1", {"sampling": lambda: Sampling(seed=-1)}),
        ("temperature=1e-40", {"sampling": lambda: Sampling(temperature=1e-40)}),
        ("stop='ab' is one text", {"sampling": lambda: Sampling(stop="ab")}),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=said):
            engine.add("abc", **{name: value() if callable(value) else value for name, value in more.items()})
    with pytest.raises(ValueError, match="is one text"):
        engine.generate("abc")
    assert not engine.busy
    want, plain = alone(lab, [5, 6, 7], 6), engine._run

    def broken(plan: Any) -> Any:
        monkeypatch.setattr(engine, "_run", plain)
        raise RuntimeError("out of paper")

    engine.add([5, 6, 7], Sampling(max_new_tokens=6, **GREEDY), id="a")
    monkeypatch.setattr(engine, "_run", broken)
    with pytest.raises(RuntimeError, match="out of paper"):
        engine.step()
    bad = engine.add([9, 9], Sampling(max_new_tokens=6, **GREEDY), id="b")

    def half(plan: Any) -> Any:
        logits = plain(plan)
        logits[[work.request for work in plan.work if work.makes].index(bad)] = float("nan")
        return logits

    monkeypatch.setattr(engine, "_run", half)
    (lost,) = engine.step()
    monkeypatch.setattr(engine, "_run", plain)
    while engine.busy:
        done = engine.step()
    assert (lost.id, lost.reason, list(done[0].tokens)) == ("b", "error", want)
    engine.tree.clear()  # type: ignore[union-attr]
    assert engine.pool.free == engine.pool.blocks
