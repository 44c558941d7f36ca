"""The same cache on every family of models, against transformers' own cache and against attention with every weight in a matrix."""

from __future__ import annotations

import copy

import pytest
import torch

from kvlab import KVCache, Strategy, keep, place, store
from kvlab.cache import forward, layer_plan
from tests import zoo
from tests.explicit import explicit, weights_of
from tests.reference import ours, plain
from tests.strategies import one_by_one

CUTS = [[40], [1, 2, 40], [16, 20, 21, 22, 23, 33, 40]]
BIG = 4096


@pytest.fixture(params=zoo.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def left_padding(ids: torch.Tensor) -> torch.Tensor:
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    return padding


@pytest.mark.many
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_a_full_budget_loses_nothing(family: str, ids: torch.Tensor, padded: bool) -> None:
    model, padding = zoo.model(family), left_padding(ids) if padded else None
    for number, cuts in enumerate(CUTS):
        want = plain(model, ids, cuts, padding)
        for strategy in one_by_one(BIG)[number::3]:  # each strategy at one way of cutting; test_parity draws the rest
            got, _ = ours(model, strategy, ids, cuts, padding)
            assert (got - want).abs().max() < 1e-5, (cuts, strategy)


def narrows(family: str, rule):  # type: ignore[no-untyped-def]
    """``rule`` for the layers without a window of their own; the layers with one keep it under any strategy."""
    kinds = getattr(zoo.model(family).config, "layer_types", None) or ["full_attention"] * 9
    every = family == "mistral"

    def allowed(layer: int, scores: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
        return see if every or kinds[layer] != "full_attention" else rule(layer, scores, see)

    return allowed


def window(size: int, sinks: int):  # type: ignore[no-untyped-def]
    def rule(layer: int, scores: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
        i, j = torch.arange(see.shape[-1], device=see.device)[:, None], torch.arange(see.shape[-1], device=see.device)[None]
        return ((j < sinks) | (j >= i - size)).expand_as(see)

    return rule


def heavy_hitters(family: str, budget: int, recent: int, sinks: int):  # type: ignore[no-untyped-def]
    """H2O by its definition, a query at a time, on one row."""
    model = zoo.model(family)
    parameters = {m.layer_idx: m.sinks for m in model.modules() if hasattr(m, "sinks")}
    # layers that share keys and values judge them by the attention of all of them, in which a later layer sees what the first has left
    assert family != "gemma3n"
    config = model.config

    def rule(layer: int, scores: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
        hq, n = scores.shape[1], scores.shape[2]
        hk = getattr(config, "num_key_value_heads", None) or hq
        out = torch.zeros_like(see)
        for kv in range(hk):
            heads = range(kv * hq // hk, (kv + 1) * hq // hk)
            held: list[int] = []
            mass = torch.zeros(n, dtype=torch.float64)
            for i in range(n):
                held.append(i)
                for head in heads:
                    out[0, head, i, held] = True
                    row = scores[:, head : head + 1, i : i + 1, held]
                    mass[held] += weights_of(row, parameters[layer][head : head + 1] if layer in parameters else None)[
                        0, 0, 0
                    ].cpu()
                while len(held) > budget:
                    free = [j for j in held if j >= sinks and j < i + 1 - recent]
                    held.remove(min(free, key=lambda j: (mass[j].item(), j)))
        return out

    return rule


STEPS = list(range(1, 41))
PLACES = [place.Resident(), place.Offload()]


@pytest.mark.many
@pytest.mark.parametrize("where", PLACES, ids=str)
def test_window_and_sinks_equal_a_mask(family: str, ids: torch.Tensor, where: place.Resident) -> None:
    model = zoo.model(family)
    got, cache = ours(model, Strategy(keep=keep.Window(size=9, sinks=3), place=where), ids, STEPS)
    want = explicit(model, ids, narrows(family, window(9, 3)))
    assert (got - want).abs().max() < 1e-5
    for layer, (own, _) in zip(cache.layers, layer_plan(model), strict=True):
        if layer.is_initialized:
            assert len(layer.store) == (12 if own is None else own - 1)


@pytest.mark.many
@pytest.mark.parametrize("where", PLACES, ids=str)
def test_heavy_hitters_equal_their_definition(family: str, ids: torch.Tensor, where: place.Resident) -> None:
    if family == "gemma3n":
        pytest.skip("its layers judge shared keys together; test_shared_keys_are_judged_by_all_their_readers")
    model = zoo.model(family)
    got, _ = ours(model, Strategy(keep=keep.HeavyHitter(budget=12, recent=4, sinks=2), place=where), ids[:1], STEPS)
    want = explicit(model, ids[:1], narrows(family, heavy_hitters(family, 12, 4, 2)))
    assert (got - want).abs().max() < 1e-5


def test_layers_with_a_window_hold_no_more_than_it(ids: torch.Tensor) -> None:
    model = zoo.model("mistral")
    cache = ours(model, Strategy(), ids, [40])[1]
    assert [len(layer.store) for layer in cache.layers] == [zoo.WINDOW - 1] * 3
    # 11 tokens x 2 rows x 2 KV heads x 16 numbers x 2 sides x 3 layers x 4 bytes, and the columns of 3 x 11 tokens
    assert cache.memory().logical == 11 * 2 * 2 * 16 * 2 * 3 * 4 + 3 * 11 * 4
    chunked = ours(zoo.model("llama4"), Strategy(store=store.Int(group_size=8)), ids, [25, 40])[1]
    assert [len(layer.store) for layer in chunked.layers] == [11, 40, 11]


def test_shared_keys_are_judged_by_all_their_readers(ids: torch.Tensor) -> None:
    """Gemma3n: layer 1 owns the keys that layer 4 reads, layer 2 those of layer 3."""
    model = zoo.model("gemma3n")
    assert layer_plan(model) == [(12, 1), (None, 2), (12, 2), (None, 1), (None, 1)]
    seen: dict[int, torch.Tensor] = {}

    def everything(layer: int, scores: torch.Tensor, see: torch.Tensor) -> torch.Tensor:
        seen[layer] = weights_of(scores).view(2, 2, 2, 40, 40).sum((2, 3))
        return see

    explicit(model, ids, everything)
    cache = ours(model, Strategy(keep=keep.HeavyHitter(budget=10, recent=3, sinks=1)), ids, [40])[1]
    mass = seen[1] + seen[4]
    for row in range(2):
        for head in range(2):
            best = mass[row, head, 1:37].topk(6).indices + 1
            assert cache.layers[1].dense()[2][row, head].tolist() == sorted([0, 37, 38, 39, *best.tolist()])
    assert not any(layer.is_initialized for layer in cache.layers[3:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_half_precision_stays_near_single(name: str, dtype: torch.dtype, ids: torch.Tensor) -> None:
    """No further from float32 than twice transformers' own cache in the same half precision, on average over the logits."""
    exact = plain(zoo.model(name), ids, [16, 17, 40])
    half = copy.deepcopy(zoo.model(name)).to(dtype)
    own = (plain(half, ids, [16, 17, 40]).float() - exact).abs().mean()
    for strategy in one_by_one(BIG)[::3]:
        got = (ours(half, strategy, ids, [16, 17, 40])[0].float() - exact).abs().mean()
        assert got < 2 * own, strategy
    assert own < (0.02 if dtype == torch.float16 else 0.15)


def test_a_sliding_model_rolls_back(ids: torch.Tensor) -> None:
    """Assisted decoding takes steps back: then a window's tokens wait until the step is confirmed."""
    model = zoo.model("mistral")
    cache = KVCache(model)
    for layer in cache.layers:
        layer.activate_past_recording()
    forward(model, ids[:, :20], cache)
    forward(model, ids[:, 5:9], cache)  # a wrong draft
    cache.crop(-4)
    assert [len(layer.store) for layer in cache.layers] == [11] * 3 and cache.get_seq_length() == 20
    got = forward(model, ids[:, 20:40], cache)
    assert (got - plain(model, ids, [40])[:, 20:]).abs().max() < 1e-5
