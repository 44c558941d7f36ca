"""What every store must do, whichever there are: found in the registry, at its defaults and at settings of its own."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from kvlab import KVCache, Strategy, keep, store
from kvlab.cache import forward
from kvlab.geometry import Geometry
from kvlab.keep.base import Room
from kvlab.measure import predict
from kvlab.rope import Rope
from kvlab.store.base import LayerShape, StoreState
from kvlab.store.rotated import rotation
from kvlab.strategy import methods
from tests.conftest import make_llama
from tests.strategies import covering

DEVICE = torch.device("cpu")
SMALL = [
    *(method() for method in methods("store").values()),
    *(store.Int(bits=bits, group_size=8, key_axis=axis) for bits, axis in product((8, 4, 3, 2), ("channel", "token"))),
    *(store.Int(bits=bits, group_size=8, symmetric=True) for bits in (8, 3, 2)),
    store.Int(bits=4, group_size=8, key_axis="tensor"),
    store.Int(bits=4, group_size=8, key_axis="token", symmetric=True),
    store.Int(bits=4, group_size=8, residual=11, sinks_exact=3),
    store.Int(bits=3, group_size=16, residual=5, sinks_exact=20, clip=0.9, scales="float32"),
    store.Int(bits=4, group_size=8, key_axis="token", residual=4, sinks_exact=2),
    store.KIVI(group_size=8, residual=16),
    store.KIVI(bits=4, group_size=16, residual=32),
    store.Fp8(format="e5m2", residual=6),
    store.Rotated(inner=store.Int(bits=2, group_size=8), kind="random"),
    store.Rotated(inner=store.KIVI(group_size=8, residual=16), values=False),
    store.Mixed(bits=8, value_bits=3, group_size=8, layers="0-1=4/2", residual=5, sinks_exact=2),
    store.Mixed(bits=2, value_bits=8, key_axis="token", group_size=16, layers="2=3/3", plain="bfloat16"),
    store.Rotated(inner=store.Int(bits=4, group_size=16, key_axis="token"), heads=2, block=16, reorder=True),
    store.Rotated(inner=store.Int(bits=3, key_axis="token", symmetric=True, levels="normal", residual=4), kind="random", heads=2, values=False),
    store.Int(bits=2, group_size=16, levels="normal"),
    store.Int(bits=4, group_size=16, levels="normal", symmetric=True),
    store.PreRope(inner=store.Dense()),
    store.PreRope(inner=store.Int(bits=8, group_size=8, residual=9, sinks_exact=2, plain="float16")),
    store.PreRope(inner=store.Rotated(inner=store.Int(bits=4, group_size=16, key_axis="token"), block=8, reorder=True)),
    store.LowRank(rank=8, first=16),
    store.LowRank(rank=16, first=16, bits=4, group_size=8, values=False, residual=3, sinks_exact=2),
    store.LowRank(rank=24, first=32, bits=32, energy=0.7, pre_rope=False),
]  # fmt: skip
ROPE = Rope(10000.0 ** -(torch.arange(0, 32, 2) / 32))


def exact(method) -> bool:
    """Numbers come back to the last bit where they are plain; a turn there and back rounds them."""
    return not isinstance(method, store.Rotated | store.PreRope | store.LowRank)


def direct(method) -> bool:
    """Numbers are written one by one, as they come."""
    return isinstance(method, store.Dense | store.Int | store.Fp8)


def shape(batch: int = 2, heads: int = 2, dim: int = 32, dtype: torch.dtype = torch.float32) -> LayerShape:
    return LayerShape(0, 3, batch, heads, dim, dim, dtype, DEVICE, ROPE)


def fill(method, pieces, of=None):
    of = of or shape()
    state = method.state(of)
    torch.manual_seed(0)
    rows = []
    for n in pieces:
        new = [torch.randn(of.batch, of.kv_heads, n, of.key_dim).to(of.dtype) for _ in range(2)]
        rows.append(new)
        state.append(*new)
        state.settle()
    return state, [torch.cat(side, 2) for side in zip(*rows, strict=True)]


@pytest.mark.many
@pytest.mark.parametrize("method", SMALL, ids=str)
@pytest.mark.parametrize("rows", [3, 40], ids=["a few queries", "many queries"])
def test_attention_reads_what_is_stored(method, rows):
    state, _ = fill(method, [37, 1, 1, 30, *[1] * 30])
    keys, values = (x.double() for x in state.dense())
    query, weights = torch.randn(2, 2, rows, 32), torch.rand(2, 2, rows, 99)
    blocks = list(state.blocks(rows))
    assert blocks[0][0] == 0 and blocks[-1][1] == 99 and all(a[1] == b[0] for a, b in pairwise(blocks))
    scores = torch.cat([state.score(query, a, b) for a, b in blocks], -1)
    torch.testing.assert_close(scores.double(), query.double() @ keys.mT, rtol=1e-4, atol=1e-4)
    mixed = sum(state.mix(weights[..., a:b], a, b) for a, b in blocks)
    torch.testing.assert_close(mixed.double(), weights.double() @ values, rtol=1e-4, atol=1e-4)


# Lloyd-Max steps differ, and the outermost may be passed by far: their error stands in test_lowrank.py
@pytest.mark.parametrize("method", [m for m in SMALL if direct(m) and getattr(m, "levels", "even") == "even"], ids=str)
def test_numbers_come_back_within_half_a_step(method):
    """Integer codes: half a step of the group's range, at most; floats: half of a last place."""
    state, sides = fill(method, [64])
    for dense, plain in zip(state.dense(), sides, strict=True):
        error = (dense - plain).abs()
        if isinstance(method, store.Fp8):
            bound = plain.abs() * (2**-4 if method.format == "e4m3" else 2**-3) + plain.abs().amax() * 2**-9
        elif isinstance(method, store.Int):
            wide = plain.amax() - plain.amin() if not method.symmetric else 2 * plain.abs().amax()
            bits = min(
                method.bits,
                getattr(method, "value_bits", 8),
                *(b for pair in getattr(method, "profile", dict)().values() for b in pair),
            )
            levels = 2**bits - (2 if method.symmetric else 1)
            bound = (wide / levels / 2 * 1.01 + (1 - method.clip) * wide / 2).expand_as(plain)
        else:
            bound = torch.zeros_like(plain)
        assert (error <= bound + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", SMALL, ids=str)
def test_half_precision_is_taken(method, dtype):
    state, sides = fill(method, [37, 1, 30], shape(dtype=dtype))
    keys, _ = state.dense()
    assert keys.dtype == dtype
    query = torch.randn(2, 2, 3, 32).to(dtype)
    scores = torch.cat([state.score(query, a, b).double() for a, b in state.blocks(3)], -1)
    exact = query.double() @ sides[0].double().mT
    single, (plain, _) = fill(method, [37, 1, 30])
    loss = (query.double() @ (single.dense()[0] - plain).double().mT).abs().mean()
    assert (scores - exact).abs().mean() < 1.2 * loss + 0.03


@pytest.mark.parametrize("full", covering(48)["store"], ids=str)
def test_a_prompt_shorter_than_the_residual_is_exact(full):
    state, (keys, values) = fill(full, [40, 1, 1, 5])
    same = torch.equal if exact(full) else lambda a, b: torch.allclose(a, b, atol=1e-5)
    assert same(state.dense()[0], keys) and same(state.dense()[1], values)


@pytest.mark.parametrize("dim", [1, 2, 6, 64, 80, 96, 128, 160])
def test_a_rotation_is_orthogonal_and_spreads_a_channel(dim):
    for kind in ("hadamard", "random"):
        turn = rotation(dim, kind).double()
        torch.testing.assert_close(turn @ turn.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-6)
        if dim & (dim - 1) == 0:
            torch.testing.assert_close(turn.abs(), torch.full((dim, dim), dim**-0.5, dtype=torch.float64), rtol=1e-6, atol=0)
        assert float(turn.abs().max()) <= 1.01 * (2 / dim) ** 0.5 or dim == 1


def test_a_rotation_saves_a_key_with_one_large_channel():
    """One channel at +80: a scale a token loses the others, but not after a rotation; a scale a channel does not care."""
    keys = torch.randn(1, 2, 64, 64)
    keys[..., 5] += 80
    off = {}
    for name, method in {
        "token": store.Int(bits=4, key_axis="token"),
        "channel": store.Int(bits=4),
        "rotated": store.Rotated(),
    }.items():
        state = method.state(LayerShape(0, 1, 1, 2, 64, 64, torch.float32, DEVICE))
        state.append(keys, keys.clone())
        state.settle()
        off[name] = float((state.dense()[0] - keys).abs().mean())
    assert off["rotated"] < 0.5 * off["token"] and off["channel"] < 0.2 * off["token"]


def test_mixed_bits_by_layer():
    method = store.Mixed(bits=4, value_bits=2, layers="0-1=8/4, 29 = 4/8")
    assert method.profile() == {0: (8, 4), 1: (8, 4), 29: (4, 8)}
    state = method.state(LayerShape(29, 30, 1, 2, 64, 64, torch.float32, DEVICE))
    assert (state.keys.coding.bits, state.values.coding.bits) == (4, 8)
    with pytest.raises(ValueError, match="names layer 29, the model has 12"):
        method.state(LayerShape(0, 12, 1, 2, 64, 64, torch.float32, DEVICE))
    for bad in ("1=5/4", "3-1=8/8", "x=8/8", "1=8", "1=8/8, 0-2=4/4"):
        with pytest.raises(ValueError, match="Mixed: layers="):
            store.Mixed(layers=bad)


def test_the_flush_at_its_border():
    """One below the residual nothing is written, at it nothing, one group above it a group."""
    for residual in (8, 16):
        for extra, groups in ((-1, 0), (0, 0), (1, 0), (7, 0), (8, 1), (16, 2)):
            state, _ = fill(store.Int(bits=4, group_size=8, residual=residual), [residual + extra])
            assert len(state.keys) == len(state.values) == 8 * groups


def test_kivi_writes_keys_by_the_buffer_and_values_by_the_window():
    """arXiv 2402.02750, section 4: keys are written when the residual is full, values one by one."""
    method = store.KIVI(group_size=8, residual=16)
    for n in range(1, 50):
        for pieces in ([n], [1] * n):
            state, _ = fill(method, pieces)
            assert len(state.keys) == n // 16 * 16
            assert len(state.values) == max(0, n - 16)


def test_kivi_covers_any_length_in_whole_groups():
    assert store.KIVI().covering(200).residual == 224


def test_the_first_tokens_stay_exact_for_good():
    method = store.Int(bits=2, group_size=8, sinks_exact=3)
    for pieces in ([60], [1] * 60, [2, 5, 20, 33]):
        state, (keys, values) = fill(method, pieces)
        got = state.dense()
        assert torch.equal(got[0][:, :, :3], keys[:, :, :3]) and torch.equal(got[1][:, :, :3], values[:, :, :3])
        assert not torch.equal(got[0][:, :, 3:11], keys[:, :, 3:11])
        assert state.borders == [3, 59]  # 57 tokens after the first: 7 groups, one token waits


def test_fp8_takes_a_larger_token_later():
    """A scale frozen at a prefill of amax 0.35 would store 5.0 as 0.35."""
    state = store.Fp8().state(shape())
    state.append(torch.full((2, 2, 6, 32), 0.35), torch.full((2, 2, 6, 32), 0.35))
    state.settle()
    state.append(torch.full((2, 2, 1, 32), 5.0), torch.full((2, 2, 1, 32), 5.0))
    state.settle()
    for side in state.dense():
        torch.testing.assert_close(side[:, :, 6], torch.full((2, 2, 32), 5.0), rtol=1e-3, atol=0)
        torch.testing.assert_close(side[:, :, :6], torch.full((2, 2, 6, 32), 0.35), rtol=1e-3, atol=0)


@pytest.mark.parametrize("method", SMALL, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(method, bad):
    state, sides = fill(method, [64])
    if all(torch.allclose(a, b, atol=1e-5) for a, b in zip(state.dense(), sides, strict=True)):
        return  # all of it is plain
    state = method.state(shape())
    rows = torch.randn(2, 2, 64, 32)
    rows[1, 0, 30, 7] = bad
    with pytest.raises(ValueError, match="cannot be quantized"):
        _settled(state, rows)


def _settled(state, rows):
    state.append(rows, torch.randn(2, 2, 64, 32))
    state.settle()


@pytest.mark.parametrize("value", [0.0, -3.25, 1e-8])
@pytest.mark.parametrize("method", [*filter(direct, SMALL)], ids=str)
def test_constant_rows_come_back(method, value):
    state = method.state(shape())
    rows = torch.full((2, 2, 64, 32), value)
    state.append(rows, rows.clone())
    state.settle()
    for side in state.dense():
        torch.testing.assert_close(side, rows, rtol=2e-3, atol=1e-7)


@pytest.mark.many
@pytest.mark.parametrize("method", SMALL, ids=str)
def test_bytes_are_as_predicted(method):
    """Over a model's layers, growth slack apart, within 1%; at the prompt and after as many steps."""
    model = make_llama(head_dim=32)
    geometry = Geometry.from_config(model.config)
    cache = KVCache(model, Strategy(store=method))
    generator = torch.Generator().manual_seed(0)
    for n in (200, 1, 1, 60):
        forward(model, torch.randint(3, 97, (2, n), generator=generator), cache)
        memory = cache.memory()
        want = predict(geometry, Strategy(store=method), cache.get_seq_length(), batch=2, bits=32)
        if getattr(method, "energy", 0):  # its ranks come from the text: what is predicted is the most
            assert memory.logical < sum(want.values())
        else:
            assert memory.logical == pytest.approx(sum(want.values()), rel=0.01)
        assert memory.allocated <= memory.logical * 1.07 + 3 * 2 * 9 * (2 * 2 * 32 * 4)  # nine rows a layer and side at least


@pytest.mark.parametrize("method", SMALL, ids=str)
def test_drafts_are_taken_back(method):
    """A crop leaves the rows before it as they were, but for those whose group it cuts through."""
    state, sides = fill(method, [50, 1, 1])
    before = [x.clone() for x in state.dense()]
    state.truncate(37)
    assert len(state) == 37
    for got, was, plain in zip(state.dense(), before, sides, strict=True):
        whole = 37 // 32 * 32
        torch.testing.assert_close(got[:, :, :whole], was[:, :, :whole])
        assert (got - plain[:, :, :37]).abs().mean() <= (was[:, :, :37] - plain[:, :, :37]).abs().mean() + 0.1
    state.append(*[x[:, :, 37:] for x in sides])
    state.settle()
    assert len(state) == 52


@pytest.mark.many
@pytest.mark.parametrize("method", [m for m in SMALL if "evict" in m.offers], ids=str)
def test_eviction_takes_the_same_rows_from_what_is_stored(method):
    """With a window that rolls over codes, first tokens and tail, the kept rows are those stored before."""
    model = make_llama(head_dim=32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (2, 80), generator=generator)
    for strategy in (
        Strategy(keep=keep.Window(size=40, sinks=4), store=method),
        Strategy(keep=keep.HeavyHitter(budget=48, recent=8), store=method),
    ):
        cache = KVCache(model, strategy)
        for start in range(0, 80, 8):
            forward(model, ids[:, start : start + 8], cache)
        limit = strategy.keep.limit(Room(seen=80))
        for layer in cache.layers:
            keys, values, columns = layer.dense()
            assert keys.shape[2] == limit == columns.shape[2] and (columns.diff(dim=2) > 0).all()
            assert keys.isfinite().all() and values.isfinite().all()


SINGLE = [
    store.Dense(),
    store.Int(group_size=8),
    store.Int(bits=3, group_size=8, key_axis="token", sinks_exact=4, residual=12),
    store.Int(bits=2, group_size=16, key_axis="tensor"),
    store.KIVI(group_size=8, residual=16),
    store.Fp8(),
    store.Rotated(store.Int(bits=4, group_size=8, key_axis="token")),
    store.Rotated(store.Int(bits=4, group_size=8, key_axis="token"), heads=2),
    store.PreRope(store.Int(bits=4, group_size=8)),
    store.LowRank(rank=8, first=16, bits=4, group_size=8),
]


@pytest.mark.parametrize("method", SINGLE, ids=str)
@pytest.mark.parametrize("answer", [keep.Everything(), keep.HeavyHitter(budget=60, recent=8)], ids=str)
def test_single_rows_are_those_of_whole_blocks(llama, method, answer):
    """Wherever a row lies: plain first tokens, codes, the tail; after eviction by each row's own scales."""
    if not answer.needs <= {"attention", *method.offers} and "evict" not in method.offers:
        pytest.skip("this store cannot evict")
    ids = torch.randint(3, 97, (2, 150), generator=torch.Generator().manual_seed(0))
    cache = KVCache(llama, Strategy(store=method, keep=answer))
    for start, stop in ((0, 100), (100, 120), (120, 150)):
        forward(llama, ids[:, start:stop], cache)
    state = cache.layers[1].store
    index = torch.randint(0, len(state), (2, 2, 40), generator=torch.Generator().manual_seed(1))
    for got, want in zip(state.rows_at(index), StoreState.rows_at(state, index), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inner", [store.Dense(), store.Paged(page=8)], ids=str)
def test_rotation_of_plain_halves(inner, dtype):
    """Nothing is quantized: a rotation and its inverse, to half precision."""
    model = make_llama().to(dtype)
    ids = torch.randint(3, 97, (1, 82), generator=torch.Generator().manual_seed(0))
    out = []
    for method in (inner, store.Rotated(inner)):
        cache = KVCache(model, Strategy(store=method))
        out.append(torch.cat([forward(model, ids[:, a:b], cache) for a, b in ((0, 40), (40, 80), (80, 81), (81, 82))], 1).float())
    assert (out[0] - out[1]).abs().max() < (0.05 if dtype == torch.float16 else 0.5)


def test_one_scale_for_all_heads_survives_a_repack():
    """Heads that keep different tokens, keys with one scale a group for all of them."""
    model = make_llama()
    ids = torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(0))
    method = store.Int(bits=4, group_size=8, key_axis="tensor")
    cache = KVCache(model, Strategy(keep=keep.KeyDiff(budget=24, recent=4, sinks=1), store=method))
    forward(model, ids[:, :40], cache)
    for token in range(40, 150):
        assert forward(model, ids[:, token : token + 1], cache).isfinite().all()
    assert cache.memory().repacked > 0 and cache.memory().stored <= 25


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (store.Mixed(layers="7=8/8"), "names layer 7, the model has 3"),
        (store.Rotated(heads=3), "heads=3 does not divide"),
        (store.Int(group_size=12, key_axis="token"), "group_size=12"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_known_at_once(method, words):
    with pytest.raises(ValueError, match=words):
        KVCache(make_llama(), Strategy(store=method))


@pytest.mark.parametrize("method", [store.LowRank(rank=8, first=16), store.Rotated(store.Int(bits=3, group_size=8, key_axis="token"), block=8, reorder=True)], ids=str)  # fmt: skip
def test_cropped_to_nothing_is_new(method):
    """What was learned from a text goes with it."""
    model, seed = make_llama(), torch.Generator().manual_seed(0)
    one, other = (torch.randint(3, 97, (1, 60), generator=seed) for _ in range(2))
    used, fresh = KVCache(model, Strategy(store=method)), KVCache(model, Strategy(store=method))
    forward(model, one, used)
    used.crop(-60)
    for start, stop in ((0, 40), (40, 60)):
        assert torch.equal(forward(model, other[:, start:stop], used), forward(model, other[:, start:stop], fresh))
