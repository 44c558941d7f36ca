"""Rows moved together, turned to new places, rotated and written as codes: each against torch's own way or float64."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab_kernels.layout import dequantize, unpack
from kvlab_kernels.quantize import rotate_quantize, rotate_quantize_torch
from kvlab_kernels.rows import gather_tokens, rope_shift

FEW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def waves(places, half):
    """Cosines and sines of every place, and the frequencies they are of."""
    frequencies = 10000.0 ** -(torch.arange(half) / half)
    angles = torch.arange(places)[:, None] * frequencies.double()
    return torch.cat([angles.cos(), angles.sin()], 1).float(), frequencies


@FEW
@given(
    st.sampled_from([*DTYPES, torch.uint8, torch.int32]), st.integers(1, 2), st.integers(1, 3), st.integers(1, 90), st.integers(0, 70),
    st.sampled_from([1, 3, 8, 16, 40, 64, 300]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_rows_are_copied_as_they_are(dtype, b, h, n, m, w, shared, view):
    whole = torch.randint(0, 200, (b, h, n, 2 * w if view else w)).to(dtype)
    x = whole[..., :w]
    index = torch.randint(0, n, (1 if shared else b, 1 if shared else h, m))
    want = x.gather(2, index.expand(b, h, m)[..., None].expand(b, h, m, w))
    assert torch.equal(gather_tokens(x, index), want)
    room = torch.full((b, h, m + 3, w), 7).to(dtype)
    assert torch.equal(gather_tokens(x, index.int(), room[:, :, :m]), want) and (room[:, :, m:] == 7).all()


@FEW
@given(
    st.sampled_from(DTYPES), st.integers(1, 2), st.integers(1, 2), st.integers(1, 80), st.sampled_from([(16, 8), (64, 32), (80, 20), (96, 48), (128, 16)]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_turning_equals_complex_numbers(dtype, b, h, n, dims, interleaved, back):
    d, half = dims
    k, (table, frequencies) = torch.randn(b, h, n, d).to(dtype), waves(500, half)
    places = torch.randint(-499, 500, (b, 1, n))
    own = k[..., : 2 * half].double()
    one, two = (own[..., ::2], own[..., 1::2]) if interleaved else own.chunk(2, -1)
    angle = places[..., None] * frequencies.double() * (-1 if back else 1)
    turned = torch.complex(one, two) * torch.polar(torch.ones_like(angle), angle)
    want = k.double().clone()
    if interleaved:
        want[..., : 2 * half : 2], want[..., 1 : 2 * half : 2] = turned.real, turned.imag
    else:
        want[..., :half], want[..., half : 2 * half] = turned.real, turned.imag
    got = rope_shift(k, places, table, interleaved=interleaved, back=back)
    assert (got.double() - want).abs().max() < {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    assert torch.equal(rope_shift(k.clone(), places, table, interleaved=interleaved, back=back, out=k), got) and torch.equal(
        k, got
    )


def test_there_and_back_and_by_one_number():
    k, table = torch.randn(2, 3, 33, 64), waves(101, 32)[0]
    there = rope_shift(k, 100, table)
    assert (rope_shift(there, 100, table, back=True) - k).abs().max() < 1e-5
    assert torch.equal(rope_shift(k, 0, table), k)
    assert (rope_shift(rope_shift(k, 30, table), 70, table) - there).abs().max() < 1e-4


@FEW
@given(
    st.sampled_from(DTYPES), st.sampled_from([8, 4, 2]), st.sampled_from([(64, 64), (64, 32), (128, 64), (96, 96), (80, 16), (256, 128)]), st.integers(1, 40),
)  # fmt: skip
def test_rotated_codes(dtype, bits, dims, n):
    """The same codes as rotating first, but where a number lies so near between two that the sums' last digits decide."""
    d, group = dims
    x, matrix = torch.randn(2, 2, n, d).to(dtype), torch.linalg.qr(torch.randn(d, d))[0]
    x[..., 3] += 8.0
    got, want = (way(x, matrix, bits, group) for way in (rotate_quantize, rotate_quantize_torch))
    a, b = unpack(got.codes, bits).int(), unpack(want.codes, bits).int()
    assert (a - b).abs().max() <= 1 and float((a != b).float().mean()) < 0.02
    torch.testing.assert_close(got.scale, want.scale, rtol=2e-3, atol=1e-6)
    exact = x.double() @ matrix.double()
    step = got.scale.double().repeat_interleave(group, 3)
    assert ((dequantize(got).double() - exact).abs() <= 0.51 * step + 2e-3 * exact.abs().max()).all()


@pytest.mark.usefixtures("poison")
def test_everything_is_written():
    codes = rotate_quantize(torch.randn(1, 2, 17, 64), torch.eye(64), 4, 32)
    assert codes.scale.isfinite().all() and codes.zero.isfinite().all()
    assert torch.equal(
        codes.codes, rotate_quantize_torch(torch.randn(1, 2, 17, 64) * 0 + dequantize(codes), torch.eye(64), 4, 32).codes
    )
    assert gather_tokens(torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 9, dtype=torch.long)).eq(0).all()


def test_what_does_not_fit_is_named():
    x, one = torch.randn(1, 2, 5, 16), torch.ones(4, 16)
    for call, words in [
        (lambda: gather_tokens(x, torch.tensor([[[5]]])), "index goes from 5 to 5, must be 0 to 4"),
        (lambda: gather_tokens(x, torch.zeros(1, 3, 2, dtype=torch.long)), r"index is torch.int64 \[1, 3, 2\]"),
        (lambda: gather_tokens(x, torch.zeros(1, 1, 2)), "index is torch.float32"),
        (lambda: gather_tokens(x, torch.zeros(1, 1, 2, dtype=torch.long), x), "out is"),
        (lambda: gather_tokens(x.mT, torch.zeros(1, 1, 2, dtype=torch.long)), "its last dim contiguous"),
        (lambda: rope_shift(x, torch.zeros(1, 1, 4, dtype=torch.long), one), "places is"),
        (
            lambda: rope_shift(x, 1, torch.ones(4, 18)),
            r"waves is torch.float32 \[4, 18\], must be float32 \[P, R\], R even and 2 to 16",
        ),
        (lambda: rope_shift(x, -4, one), "places go to 4, waves to 3"),
        (lambda: rope_shift(x.int(), 1, one), "k is torch.int32"),
        (lambda: rotate_quantize(x, torch.eye(8), 4, 8), "matrix is"),
        (lambda: rotate_quantize(x, torch.eye(16), 5, 8), "bits=5"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
