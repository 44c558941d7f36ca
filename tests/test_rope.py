"""How a model turns its keys, found by looking at it read one token again and again."""

from __future__ import annotations

import pytest
import torch

from kvlab import UnsupportedModel, store
from kvlab.cache import KVCache, forward, ropes
from kvlab.rope import TOKENS, Rope, find
from kvlab.strategy import Strategy
from tests import zoo

#: of each family, for each layer: channels turned, neighbours or halves, and the base of the frequencies (None: not turned)
TURNS = {
    "llama": [(16, False, 1e4)] * 3,
    "qwen3": [(16, False, 1e4)] * 3,
    "gemma3": [(16, False, 1e4), (16, False, 1e6), (16, False, 1e4)],  # its own base in layers that see everything
    "llama4": [(16, True, 5e5), None, (16, True, 5e5)],
    "gpt_neox": [(4, False, 1e4)] * 3,
    "gpt_oss": [(16, False, 1e4)] * 3,  # sinks: only the first layer tells
    "gpt2": [None] * 3,
    "opt": [None] * 3,
}


@pytest.mark.parametrize("family", TURNS)
def test_each_family_turns_in_its_way(family):
    model = zoo.model(family)
    for got, want in zip(ropes(model), TURNS[family], strict=True):
        if want is None:
            assert got is None
            continue
        dims, interleaved, base = want
        assert got is not None and (got.dims, got.interleaved) == (dims, interleaved)
        want_frequencies = float(base) ** -(torch.arange(0, dims, 2) / dims)
        torch.testing.assert_close(got.frequencies, want_frequencies, rtol=1e-5, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_turn_is_a_complex_product(interleaved):
    rope = Rope(torch.tensor([1.0, 0.1, 0.01]), interleaved)
    x, columns = torch.randn(2, 3, 5, 8), torch.tensor([0, 1, 7, 700, 9000]).view(1, 1, 5)
    got = rope.turn(x, columns).double()
    own = x[..., :6].double()
    pairs = torch.complex(own[..., ::2], own[..., 1::2]) if interleaved else torch.complex(own[..., :3], own[..., 3:])
    angle = columns[..., None].double() * rope.frequencies.double()
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    want = torch.stack([pairs.real, pairs.imag], -1).flatten(-2) if interleaved else torch.cat([pairs.real, pairs.imag], -1)
    torch.testing.assert_close(got[..., :6], want, rtol=0, atol=1e-5)
    assert torch.equal(got[..., 6:], x[..., 6:].double())  # a part of the head may be left alone
    torch.testing.assert_close(rope.turn(got.float(), columns, back=True), x, rtol=0, atol=1e-5)


def test_an_unknown_turn_is_refused_by_name():
    model = zoo.model("llama")
    keys = [(torch.randn(1, 2, TOKENS, 16), torch.arange(TOKENS).view(1, 1, -1))] * 3
    with pytest.raises(UnsupportedModel, match="layer 0 by position in a way kvlab does not know"):
        find(model, keys)


def test_only_stores_that_ask_for_it_look():
    model = zoo.model("phi3")
    assert KVCache(model, Strategy(store=store.Int(group_size=16))).ropes is None
    cache = KVCache(model, Strategy(store=store.PreRope(inner=store.Dense())))
    forward(model, torch.tensor([[3, 4, 5]]), cache)
    assert cache.layers[0].store.shape.rope is cache.ropes[0]
