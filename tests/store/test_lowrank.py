"""LowRank, PreRope, Lloyd-Max levels and the forms of Rotated: numbers that can be had in another way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab import KVCache, Strategy, keep, store
from kvlab.cache import forward
from kvlab.rope import Rope
from kvlab.store.base import LayerShape
from kvlab.store.lowrank import rank_for, spectrum
from kvlab_kernels.layout import normal_levels
from tests.conftest import make_llama

DEVICE = torch.device("cpu")
ROPE = Rope(10000.0 ** -(torch.arange(0, 64, 2) / 64))
SHAPE = LayerShape(0, 1, 2, 2, 64, 64, torch.float32, DEVICE, ROPE)


def low_rank(rank: int, tokens: int = 300, seed: int = 0) -> torch.Tensor:
    """Rows of exactly this rank around a mean, ``[2, 2, tokens, 64]``."""
    generator = torch.Generator().manual_seed(seed)
    basis, coefficients = torch.randn(2, 2, rank, 64, generator=generator), torch.randn(2, 2, tokens, rank, generator=generator)
    return coefficients @ basis / rank**0.5 + 3 * torch.randn(2, 2, 1, 64, generator=generator)


def turned(keys: torch.Tensor) -> torch.Tensor:
    """By the textbook: pairs as complex numbers times e^(i position frequency)."""
    half = torch.complex(keys[..., :32].double(), keys[..., 32:].double())
    angle = torch.arange(keys.shape[2])[:, None] * ROPE.frequencies.double()
    half = half * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([half.real, half.imag], -1).float()


@pytest.mark.parametrize("rank", [8, 24])
def test_a_cache_of_known_rank_comes_back(rank):
    """Keys of that rank before RoPE, values of that rank: exact to 1e-4, later tokens of the same subspace too."""
    keys, values = low_rank(rank), low_rank(rank, seed=1)
    state = store.LowRank(rank=rank, bits=32).state(SHAPE)
    for part in (slice(0, 200), slice(200, 201), slice(201, 300)):
        state.append(turned(keys)[:, :, part], values[:, :, part])
        state.settle()
    got = state.dense()
    assert (got[0] - turned(keys)).abs().max() < 1e-4 and (got[1] - values).abs().max() < 1e-4
    assert {b.part: b.view().shape[3] for b in state.buffers() if len(b) and b.part == "coefficients"} == {"coefficients": rank}


def test_what_is_lost_is_the_tail_of_the_spectrum():
    """Eckart and Young: the squared error is the sum of the squared singular values that were left out."""
    torch.manual_seed(0)
    values = torch.randn(2, 2, 200, 64) * torch.linspace(3, 0.1, 64)
    state = store.LowRank(rank=40, bits=32, pre_rope=False, sinks_exact=0).state(replace(SHAPE, rope=None))
    state.append(values, values.clone())
    state.settle()
    singular = torch.linalg.svdvals((values - values.mean(2, keepdim=True)).double())
    lost = (state.dense()[1] - values).double().square().sum((2, 3))
    torch.testing.assert_close(lost, singular[..., 40:].square().sum(-1), rtol=1e-4, atol=0)


def test_keys_have_a_lower_rank_before_rope():
    keys = low_rank(8)
    undone, as_they_come = (
        store.LowRank(rank=8, bits=32, pre_rope=pre).state(SHAPE if pre else replace(SHAPE, rope=None)) for pre in (True, False)
    )
    off = []
    for state in (undone, as_they_come):
        state.append(turned(keys), keys)
        state.settle()
        off.append(float((state.dense()[0] - turned(keys)).norm() / turned(keys).norm()))
    assert off[0] < 1e-5 and off[1] > 0.3


def test_energy_chooses_the_rank():
    x = torch.zeros(1, 1, 64, 64)
    x[0, 0].diagonal().copy_(torch.tensor([4.0] * 10 + [1.0] * 54))  # squares: 160 of 214 in the first ten directions
    assert spectrum(x)[0][0, 0, :11].tolist() == [16.0] * 10 + [1.0]
    sizes = spectrum(x)[0]
    assert rank_for(sizes, 0.7) == 16 and rank_for(sizes, 0.5) == 8 and rank_for(sizes, 1.0) == 64
    values = low_rank(12)
    state = store.LowRank(rank=64, energy=0.999, bits=32).state(SHAPE)
    state.append(values, values.clone())
    state.settle()
    assert state.inner.values.basis.view().shape == (2, 2, 64, 16)  # rank 12, in steps of 8


def test_too_few_tokens_make_no_basis():
    state = store.LowRank(rank=8, first=128, sinks_exact=0).state(SHAPE)
    rows = torch.randn(2, 2, 127, 64)
    state.append(rows, rows.clone())
    state.settle()
    assert torch.equal(state.dense()[1], rows)
    state.append(rows[:, :, :1], rows[:, :, :1])
    state.settle()
    assert not torch.equal(state.dense()[1][:, :, :127], rows)


def test_keys_are_turned_back_by_their_own_token_after_eviction():
    """A lossless inner store, per-head eviction, padding and pieces: the same keys as without the turn."""
    model = make_llama()
    ids = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(0))
    padding = (torch.arange(60) >= torch.tensor([0, 7])[:, None]).long()
    for answer in (keep.HeavyHitter(budget=24, recent=8), keep.Window(size=20, sinks=3)):
        caches = []
        for method in (store.Dense(), store.PreRope(inner=store.Dense())):
            cache = KVCache(model, Strategy(keep=answer, store=method))
            for start in range(0, 60, 12):
                forward(model, ids[:, start : start + 12], cache, padding[:, : start + 12])
            caches.append(cache)
        for one, other in zip(*(cache.layers for cache in caches), strict=True):
            for a, b in zip(one.dense(), other.dense(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_prerope_helps_a_channel_that_the_turn_hides():
    """A constant channel costs nothing per channel; after the turn it is a wave."""
    torch.manual_seed(0)
    keys = torch.randn(2, 2, 256, 64) * 0.1
    keys[..., 5] += 20.0
    off = []
    for method in (store.Int(bits=4), store.PreRope(inner=store.Int(bits=4))):
        state = method.state(SHAPE)
        state.append(turned(keys), keys)
        state.settle()
        off.append(float((state.dense()[0] - turned(keys)).norm()))
    assert off[1] < 0.1 * off[0]


def test_what_undoes_the_turn_stands_outside():
    with pytest.raises(ValueError, match="undoes the turn itself"):
        store.PreRope(inner=store.LowRank())
    with pytest.raises(ValueError, match="put it around"):
        store.Rotated(inner=store.PreRope())
    with pytest.raises(ValueError, match="rank=20 is not a multiple of 8"):
        store.LowRank(rank=20)


def test_levels_are_those_of_the_tables():
    """Max 1960, table I, for 4, 8 and 16 levels. Their error e on a normal number is 0.1175, 0.03454 and 0.009497, and what is said is shorter by 1 - e
    than the number; made as long as it, the error is e / (1 - e)."""
    assert normal_levels(2)[2:] == pytest.approx((0.4528, 1.510), abs=5e-4)
    assert normal_levels(3)[4:] == pytest.approx((0.2451, 0.7560, 1.344, 2.152), abs=5e-4)
    torch.manual_seed(0)
    x = torch.randn(1, 1, 256, 1024)
    for bits, error in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        method = store.Int(bits=bits, group_size=1024, key_axis="token", levels="normal", symmetric=True)
        state = method.state(LayerShape(0, 1, 1, 1, 1024, 1024, torch.float32, DEVICE))
        state.append(x, x + 5)
        state.settle()
        assert float((state.dense()[0] - x).square().mean()) == pytest.approx(error / (1 - error), rel=0.02)
        along = (state.dense()[0] * x).sum(3) / x.square().sum(3)
        torch.testing.assert_close(along, torch.ones_like(along), rtol=0, atol=2e-3)  # nothing is shortened
        state = replace(method, symmetric=False).state(state.shape)
        state.append(x, x + 5)  # a zero point takes the mean
        state.settle()
        assert float((state.dense()[1] - x - 5).square().mean()) == pytest.approx(error / (1 - error), rel=0.02)


@pytest.mark.parametrize("block", [0, 16])
def test_heads_rotated_together_score_as_themselves(block):
    """With eight bits in float32 scales nearly nothing is lost: scores and mixtures are those of the plain heads."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 6, 40, 16), torch.randn(2, 6, 40, 16)
    inner = store.Int(bits=8, group_size=16, key_axis="token", scales="float32")
    method = store.Rotated(inner=inner, heads=3, block=block, reorder=bool(block))
    state = method.state(LayerShape(0, 1, 2, 6, 16, 16, torch.float32, DEVICE))
    state.append(keys, values)
    state.settle()
    query, weights = torch.randn(2, 6, 4, 16), torch.rand(2, 6, 4, 40)
    torch.testing.assert_close(state.score(query, 0, 40), query @ keys.mT, rtol=0.02, atol=0.1)
    torch.testing.assert_close(state.mix(weights, 0, 40), weights @ values, rtol=0.02, atol=0.1)
    assert state.inner.shape.kv_heads == 2 and state.inner.shape.key_dim == 48


def test_reorder_deals_large_channels_to_all_blocks():
    keys = torch.randn(1, 1, 64, 64)
    keys[..., :4] += 30  # four large neighbours: one block of 16 would have them all
    method = store.Rotated(inner=store.Int(bits=8, key_axis="token", group_size=16), block=16, reorder=True)
    state = method.state(LayerShape(0, 1, 1, 1, 64, 64, torch.float32, DEVICE))
    state.append(keys, keys.clone())
    size = state.write(0, keys)[0, 0].unflatten(1, (4, 16)).norm(dim=(0, 2))
    assert float(size.max() / size.min()) < 1.1
    plain = store.Rotated(inner=method.inner, block=16).state(state.shape)
    size = plain.write(0, keys)[0, 0].unflatten(1, (4, 16)).norm(dim=(0, 2))
    assert float(size.max() / size.min()) > 10


def test_bad_rotations_are_refused():
    shape = LayerShape(0, 1, 1, 3, 64, 64, torch.float32, DEVICE)
    with pytest.raises(ValueError, match=r"heads=2 does not divide the model's 3 KV heads \(allowed: 1, 3\)"):
        store.Rotated(heads=2).state(shape)
    with pytest.raises(ValueError, match="block=48 does not divide 64 channels"):
        store.Rotated(block=48).state(shape)
    with pytest.raises(ValueError, match="reorder=True changes nothing with block=0"):
        store.Rotated(reorder=True)
    with pytest.raises(ValueError, match="HeavyHitter needs evict"):
        Strategy(keep=keep.HeavyHitter(), store=store.Rotated(heads=3))


@pytest.mark.parametrize("pre_rope", [True, False])
def test_padding_takes_no_part_in_the_basis(pre_rope):
    """A padded row gives what it gives alone, and nothing is written before its own text is long enough."""
    model = make_llama()
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
    padding = (torch.arange(40) >= torch.tensor([0, 12])[:, None]).long()
    strategy = Strategy(store=store.LowRank(rank=8, first=16, sinks_exact=0, pre_rope=pre_rope))
    both, alone = KVCache(model, strategy), KVCache(model, strategy)
    for stop in (20, 30, 40):
        want = forward(model, ids[1:, 12 if stop == 20 else stop - 10 : stop], alone)
        got = forward(model, ids[:, (stop - 10) * (stop > 20) : stop], both, padding[:, :stop])
        state = both.layers[0].store
        coded = state.inner if pre_rope else state
        assert coded.opened == (stop > 20)  # the second row has 8 tokens of its own at first, then 18
        torch.testing.assert_close(got[1, -len(want[0]) :], want[0], rtol=1e-3, atol=1e-4)


def test_energy_looks_at_the_variance_once(monkeypatch):
    from kvlab.store import lowrank

    calls = []
    monkeypatch.setattr(lowrank, "spectrum", lambda x: calls.append(x.shape) or spectrum(x))
    state = store.LowRank(rank=64, energy=0.9, bits=32).state(SHAPE)
    state.append(turned(low_rank(8)), low_rank(8, seed=1))
    state.settle()
    assert len(calls) == 2 and state.inner.values.basis.view().shape[3] == 8  # keys, values
