"""Spectra against singular values had in another way, and against what the low-rank store keeps and what it needs."""

import numpy as np
import pytest
import torch

from kvlab import store
from kvlab.measure import inspect, spectra
from kvlab.measure.inspect import Recorded
from kvlab.rope import Rope
from kvlab.store.lowrank import rank_for, spectrum

ROPE = Rope(10000.0 ** -(torch.arange(0, 16, 2) / 16))


def recorded(keys: torch.Tensor, values: torch.Tensor, rope: Rope | None = None, layers: int = 1, first: int = 0) -> Recorded:
    """One batch row from ``[heads, tokens, dim]``, the same in every layer."""
    words = tuple(f"w{number}" for number in range(first + keys.shape[1]))
    return Recorded(words, ((keys[None], values[None]),) * layers, (first,) * layers, (rope,) * layers)


@pytest.fixture
def drawn() -> Recorded:
    """Keys of rank 3 around a mean before they are turned, values of full rank; two heads of 16 channels, 40 tokens from token 5 on."""
    made = torch.Generator().manual_seed(0)
    flat = torch.randn(2, 40, 3, generator=made) @ torch.randn(2, 3, 16, generator=made) + torch.randn(2, 1, 16, generator=made)
    keys = ROPE.turn(flat[None], torch.arange(5, 45).view(1, 1, -1))[0]
    return recorded(keys, torch.randn(2, 40, 16, generator=made) * torch.linspace(3, 0.1, 16), ROPE, layers=2, first=5)


def by_svd(x: torch.Tensor) -> np.ndarray:
    """The share kept by 0, 1, ... directions a head of ``[heads, tokens, dim]``, heads added up."""
    x = x.double()
    sizes = torch.linalg.svdvals(x - x.mean(1, keepdim=True)).square().sum(0)
    return np.concatenate([[0], (sizes.cumsum(0) / sizes.sum()).numpy()])


def test_shares_by_hand():
    """Four tokens, two channels, a mean of (5, -1): 2 * 3^2 of the variance lies along the first, 2 * 1^2 along the second."""
    x = torch.tensor([[[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]]]) + torch.tensor([5.0, -1.0])
    made = spectra.spectra(recorded(x, x), 0)
    assert made.values == pytest.approx([0, 0.9, 1])
    assert made.share("before", 1) == pytest.approx(0.9)
    assert [made.rank("values", share) for share in (0.5, 0.9, 0.91, 1.0)] == [1, 1, 2, 2]


def test_heads_are_added_up():
    """A head of (18, 2) and one of (2, 0): 20 of 22 lie along the first direction of each."""
    large = torch.tensor([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    small = torch.tensor([[0.0, 1.0], [0.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
    both = torch.stack([large, small])
    assert spectra.spectra(recorded(both, both), 0).after == pytest.approx([0, 20 / 22, 1])


def test_against_singular_values(drawn):
    made = spectra.spectra(drawn, 1)
    keys, values = drawn.layers[1]
    undone = ROPE.turn(keys, torch.arange(5, 45).view(1, 1, -1), back=True)
    assert np.allclose(made.before, by_svd(undone[0]), atol=1e-5)
    assert np.allclose(made.after, by_svd(keys[0]), atol=1e-5)
    assert np.allclose(made.values, by_svd(values[0]), atol=1e-5)
    assert made.rank("before", 0.9999) == 3  # as drawn; the turn hides it
    assert made.rank("after", 0.9999) > 10
    assert made.layer == 1


def test_the_first_tokens_may_be_left_out(drawn):
    """As those are that a store keeps plain."""
    keys, values = drawn.layers[0]
    made = spectra.spectra(drawn, 0, skip=4)
    assert np.allclose(made.before, by_svd(ROPE.turn(keys, torch.arange(5, 45).view(1, 1, -1), back=True)[0, :, 4:]), atol=1e-5)
    assert np.allclose(made.values, by_svd(values[0, :, 4:]), atol=1e-5)
    back = inspect.write(drawn, store.LowRank(rank=8, bits=32, first=16, sinks_exact=4), 0).values
    exact, off = back.exact[:, 4:], (back.back - back.exact)[:, 4:]
    lost = np.square(off).sum() / np.square(exact - exact.mean(1, keepdims=True)).sum()
    assert lost == pytest.approx(1 - made.share("values", 8), rel=1e-3)


def test_without_rope_before_is_after(drawn):
    keys, values = drawn.layers[0]
    made = spectra.spectra(recorded(keys[0], values[0]), 0)
    assert made.before is made.after


def test_what_never_varies_is_kept_by_nothing():
    made = spectra.spectra(recorded(torch.ones(1, 4, 2), torch.ones(1, 4, 2)), 0)
    assert made.values.tolist() == [1, 1, 1]
    assert made.rank("values", 0.95) == 0
    turned = ROPE.turn(torch.ones(1, 1, 40, 16), torch.arange(40).view(1, 1, -1))[0]
    constant = spectra.spectra(recorded(turned, turned, ROPE), 0)
    assert constant.rank("before", 0.95) == 0  # but for rounding
    assert constant.rank("after", 0.95) > 3  # each pair of channels goes round a circle of its own


def test_the_store_keeps_this_share(drawn):
    """What the store's rank leaves out of the variance is its squared error."""
    made, how = spectra.spectra(drawn, 0), store.LowRank(rank=8, bits=32, first=16, sinks_exact=0)
    back = inspect.write(drawn, how, 0).values
    around = back.exact - back.exact.mean(1, keepdims=True)
    lost = np.square(back.back - back.exact).sum() / np.square(around).sum()
    assert lost == pytest.approx(1 - made.share("values", 8), rel=1e-3)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95, 1.0])
def test_the_store_chooses_this_rank(drawn, share):
    """Up to the next multiple of 8."""
    values = drawn.layers[0][1]
    needs = spectra.spectra(drawn, 0).rank("values", share)
    assert rank_for(spectrum(values - values.mean(2, keepdim=True))[0], share) == -(-needs // 8) * 8


def test_ranks_of_every_layer(drawn):
    seen = []
    layers = spectra.every_layer(drawn, progress=lambda *step: seen.append(step))
    made = spectra.ranks(layers, 0.9999)
    assert made.before.tolist() == [3, 3]
    assert made.values.tolist() == [layers[0].rank("values", 0.9999)] * 2
    assert made.mean("before") == 3
    assert made.dims == (16, 16)
    assert seen == [("spectra", 0, 2), ("spectra", 1, 2)]


def test_bits_are_those_that_are_held(drawn):
    """Rank 8 of 16 in 16 bits: 8 bits a number; a basis of 16 x 8 and a mean of 16, 32 bits each, for 40 x 16 numbers."""
    how = store.LowRank(rank=8, bits=16, first=16, sinks_exact=0)
    made = spectra.bits(drawn, how, 0)
    assert made == {"coefficients": 8.0, "basis": pytest.approx(32 * 16 * 9 / 640)}
    assert made == pytest.approx(inspect.write(drawn, how, 0).bits()["both"])
    assert spectra.bits(drawn, how, 0, 1_000)["basis"] == pytest.approx(32 * 16 * 9 / 16_000)
    assert spectra.bits(drawn, store.LowRank(rank=8, sinks_exact=0), 0) == {"residual": 32.0}  # fewer than 128 tokens


def test_on_a_model(tiny_lab):
    made = spectra.every_layer(inspect.record(tiny_lab, "The quick brown fox jumps over the lazy dog."))
    assert [one.layer for one in made] == [0, 1, 2]
    for one in made:
        for kind in spectra.KINDS:
            curve = one.kind(kind)
            assert (curve[0], curve[-1], len(curve)) == (0, 1, 17)
            assert (np.diff(curve) >= 0).all()
    assert not np.allclose(made[0].before, made[0].after)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda made: spectra.spectra(made, 2), r"layer=2 is out of range \(allowed: 0 to 1\)"),
        (lambda made: spectra.spectra(made, 0, 40), r"skip=40 is out of range \(allowed: 0 to 39\)"),
        (lambda made: spectra.spectra(made, 0).share("values", 17), r"rank=17 is out of range \(allowed: 0 to 16\)"),
        (lambda made: spectra.spectra(made, 0).rank("values", 0), r"share=0 is out of range \(allowed: above 0, up to 1\)"),
        (lambda made: spectra.spectra(made, 0).rank("values", float("nan")), r"share=nan is out of range"),
        (lambda made: spectra.ranks(spectra.every_layer(made), 1.5), r"share=1.5 is out of range"),
        (lambda made: spectra.ranks((), 0.9), r"layers=\(\) has no layer"),
        (lambda made: spectra.spectra(made, 0).kind("keys"), r"kind='keys' is not one of 'before', 'after', 'values'"),
        (lambda made: spectra.bits(made, store.Int(), 5), r"layer=5 is out of range \(allowed: 0 to 1\)"),
        (lambda made: spectra.bits(made, store.Int(), 0, 0), r"tokens=0 is out of range \(allowed: 1 or more\)"),
    ],
)
def test_what_is_not_there_is_said(drawn, call, words):
    with pytest.raises(ValueError, match=words):
        call(drawn)
