"""Integer codes: packing, errors within half a step, bytes as billed, the folded arithmetic against the plain reading."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import store
from kvlab.store.base import LayerShape
from kvlab.store.codes import Coding, QuantizedSide, quantize
from kvlab_kernels.layout import Codes, dequantize, pack, unpack

DIMS = {"channel": (3,), "token": (4,)}


def shape(b=2, h=3, dk=32, dv=32, dtype=torch.float32):
    return LayerShape(0, 1, b, h, dk, dv, dtype, torch.device("cpu"))


def filled(settings, n, b=2, h=3, d=32, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(b, h, n, d, generator=generator).to(dtype) for _ in range(2))
    state = settings.state(shape(b, h, d, d, dtype))
    state.append(k, v)
    state.settle()
    return state, k, v


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_packing_bit_by_bit(bits):
    codes = torch.randint(0, 2**bits, (2, 3, 5, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(codes, bits)
    assert packed.shape == (2, 3, 5, 16 * bits // 8)
    fields = 8 // bits
    for j in range(packed.shape[3]):
        want = sum(int(codes[1, 2, 4, j + i * 16 // fields]) << (i * bits) for i in range(fields))
        assert int(packed[1, 2, 4, j]) == want
    assert torch.equal(unpack(packed, bits), codes)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 4, 2]),
    n=st.integers(1, 5),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 300.0]),
    offset=st.sampled_from([0.0, 80.0, -3.0]),
    seed=st.integers(0, 99),
)
def test_error_is_at_most_half_a_step(bits, n, spread, offset, seed):
    x = torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(seed)) * spread + offset
    codes, scale, zero = quantize(x, Coding(bits, torch.float32), (3,))
    error = (codes * scale + zero - x).abs()
    assert (error <= scale / 2 * 1.001 + 1e-5 * x.abs()).all()
    assert int(codes.max()) <= 2**bits - 1


def test_numbers_that_cannot_be_quantized_are_refused():
    for bad in (float("nan"), float("inf"), 1e8):
        x = torch.ones(1, 1, 8, 8)
        x[0, 0, 3, 3] = bad
        with pytest.raises(ValueError, match="cannot be quantized"):
            quantize(x, Coding(8), (2, 3))


def test_a_biased_channel_ruins_per_token_keys_only():
    """One key channel at +80: per token its group's step grows to the bias, per channel the others never notice."""
    x = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    x[..., 5] += 80
    error = {}
    for axis in ("channel", "token", "tensor"):
        side = QuantizedSide(Coding(4), axis, 64)
        side.append(x)
        others = [d for d in range(64) if d != 5]
        error[axis] = float((side.rows() - x)[..., others].abs().mean())
    assert error["channel"] < 0.1
    assert error["token"] > 5 * error["channel"]
    assert error["tensor"] > 5 * error["channel"]


@pytest.mark.parametrize("axis", ["channel", "token", "tensor"])
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("m", [1, 40], ids=["folded", "plain"])
def test_score_and_mix_equal_the_plain_reading(axis, bits, m):
    state, _k, _v = filled(store.Int(bits=bits, group_size=16, key_axis=axis, residual=5), 83)
    keys, values = state.dense()
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, m, 32, generator=generator)
    p = torch.rand(2, 3, m, 83, generator=generator)
    scores = torch.cat([state.score(q, a, b) for a, b in state.blocks(99)], -1)
    mixed = sum(state.mix(p[..., a:b], a, b) for a, b in state.blocks(99))
    want = (q.double() @ keys.double().transpose(-1, -2), p.double() @ values.double())
    assert (scores - want[0]).abs().max() < 1e-5 * want[0].abs().max()
    assert (mixed - want[1]).abs().max() < 1e-5 * want[1].abs().max()
    assert [b for _, b in state.blocks(99)][-1] == 83


@pytest.mark.parametrize("axis", ["channel", "token", "tensor"])
def test_select_keeps_what_it_names(axis):
    state, *_ = filled(store.Int(bits=8, group_size=8, key_axis=axis, residual=4), 40)
    keys, values = state.dense()
    frozen = len(state.keys)
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.stack([torch.stack([torch.randperm(n, generator=generator)[:m].sort().values for _ in range(3)]) for _ in range(2)])
        for n, m in ((frozen, 20), (40 - frozen, 3))
    ]
    index = torch.cat([rows[0], rows[1] + frozen], 2)
    state.select(index)
    got = state.dense()
    for new, old in zip(got, (keys, values), strict=True):
        assert torch.equal(new, old.gather(2, index[..., None].expand(-1, -1, -1, 32)))


@pytest.mark.parametrize("residual", [0, 8, 32])
def test_flush_boundaries(residual):
    """Written are whole groups, once they are complete beside the residual; a prompt shorter than that is bit-exact."""
    settings_ = store.Int(bits=2, group_size=8, residual=residual)
    state = settings_.state(shape())
    k = torch.randn(2, 3, 80, 32, generator=torch.Generator().manual_seed(0))
    for n in range(80):
        state.append(k[:, :, n : n + 1], k[:, :, n : n + 1])
        state.settle()
        assert len(state.keys) == max(0, n + 1 - residual) // 8 * 8
        if n + 1 < residual + 8:
            assert torch.equal(state.dense()[0], k[:, :, : n + 1])
    assert (state.dense()[0] - k).abs().max() > 0


def test_codes_written_do_not_change():
    state = store.Int(bits=4, group_size=8).state(shape())
    k = torch.randn(2, 3, 200, 32, generator=torch.Generator().manual_seed(0))
    state.append(k[:, :, :64], k[:, :, :64])
    state.settle()
    first = state.keys.codes.view().clone()
    for n in range(64, 200):
        state.append(k[:, :, n : n + 1], k[:, :, n : n + 1])
        state.settle()
    assert torch.equal(state.keys.codes.view()[:, :, :64], first)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", ["channel", "token", "tensor"])
def test_bytes_are_as_predicted(bits, axis):
    """Codes, scales and residual by hand: within 1% of the prediction, room to grow apart."""
    settings_ = store.Int(bits=bits, group_size=16, key_axis=axis, residual=20)
    state, *_ = filled(settings_, 300)
    got: dict[str, int] = {}
    for buffer in state.buffers():
        got[buffer.part] = got.get(buffer.part, 0) + buffer.logical
    want = settings_.predict(300, shape())
    for part, size in want.items():
        assert abs(got[part] - size) <= 0.01 * size
    if (bits, axis) == (4, "channel"):  # by hand: 2 x 3 heads, 272 tokens coded, 28 plain
        assert got["codes"] == 6 * 272 * 64 // 2
        assert got["scales"] == 6 * (272 // 16 * 32 + 272 * 2) * 2 * 2
        assert got["residual"] == 6 * 28 * 64 * 4


def test_ratio_against_16_bit():
    """Group 64, residual 0, a head dim of 128: int8 at most 0.54, int4 at most 0.29 of a 16-bit cache, scales counted."""
    for bits, most in ((8, 0.54), (4, 0.29)):
        state, *_ = filled(store.Int(bits=bits), 1024, b=1, h=2, d=128)
        ratio = sum(b.allocated for b in state.buffers()) / (2 * 1024 * 256 * 2)
        assert ratio <= most


def test_what_does_not_fit_the_head_is_named():
    with pytest.raises(ValueError, match="group_size=64 does not divide the head dim 80"):
        store.Int(group_size=64).state(shape(dk=80, dv=80))
    with pytest.raises(ValueError, match="bits=2: head dim 30 cannot be packed at 2 bits"):
        store.Int(bits=2, group_size=64).state(shape(dk=30, dv=30))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    state, k, _ = filled(store.Int(bits=8, group_size=16, residual=3), 83, dtype=dtype)
    assert state.dense()[0].dtype == dtype
    assert (state.dense()[0].float() - k.float()).abs().max() < 0.05
    q = torch.randn(2, 3, 2, 32).to(dtype)
    scores = torch.cat([state.score(q, a, b).float() for a, b in state.blocks(99)], -1)
    want = q.float() @ state.dense()[0].float().transpose(-1, -2)
    assert (scores - want).abs().max() < 0.02 * want.abs().max()


def test_layout_is_what_kernels_read():
    state, *_ = filled(store.Int(bits=4, group_size=16), 64)
    codes = state.keys.layout()
    assert isinstance(codes, Codes) and codes.axis == "channel" and codes.codes.dtype == torch.uint8
    assert torch.equal(dequantize(codes), state.keys.rows())
