import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_oracle import TOLERANCE, attention, check, error, random_codes

from kvlab_kernels import launch
from kvlab_kernels.decode import decode_attention
from kvlab_kernels.layout import Codes

DTYPES = list(TOLERANCE)
EXAMPLES = int(os.environ.get("KVLAB_SHAPES", "5"))  # `make nightly` draws 40
SMALL = launch.Settings(block_n=16)  # short tiles, so that short caches have several


def query(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def run(q, k, v, **options):
    """The kernel's answer, checked against float64."""
    scaling = q.shape[-1] ** -0.5
    reference = {name: x for name, x in options.items() if name not in ("splits", "settings")}
    got = decode_attention(q, k, v, scaling=scaling, **options)
    check(got, attention(q, k, v, scaling, **reference), q.dtype)
    return got


def side(n, dim, dtype, kind, heads=1, batch=1, **options):
    if kind == "dense":
        return query(batch, heads, n, dim, dtype=dtype)
    bits, axis, group_size = kind
    return random_codes(batch, heads, n, dim, bits, axis, group_size, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "k_kind, v_kind",
    [
        ("dense", "dense"),
        ((8, "channel", 32), (8, "token", 32)),
        ((4, "channel", 16), (4, "token", 16)),
        ((2, "channel", 32), (2, "token", 8)),
        ((8, "token", 16), (4, "token", 8)),
        ((4, "token", 32), "dense"),
        ("dense", (2, "token", 32)),
        ((4, "channel", 20), (8, "token", 16)),  # groups that no tile fits: scales looked up per token
    ],
)
def test_kinds(dtype, k_kind, v_kind, poison):
    run(query(1, 6, 2, 32, dtype=dtype), side(37, 32, dtype, k_kind, 2), side(37, 32, dtype, v_kind, 2), splits=2, settings=SMALL)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dim", [80, 96, 128, 256])
def test_head_dims(bits, dim, poison):
    size = 32 if dim != 80 else 40
    k, v = side(40, dim, torch.float16, (bits, "channel", 32)), side(40, dim, torch.float16, (bits, "token", size))
    run(query(1, 4, 1, dim, dtype=torch.float16), k, v, splits=1, settings=launch.Settings(block_n=32))


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from(DTYPES))
    dim = draw(st.sampled_from([64, 80, 96, 128, 256]))
    size = draw(st.sampled_from([s for s in (16, 32, 40, 48, 64, 128) if dim % s == 0]))
    n = draw(st.integers(1, 700))
    axis = draw(st.sampled_from(["channel", "token"]))
    kind = draw(st.sampled_from(["dense", 8, 4, 2]))
    k = kind if kind == "dense" else (kind, axis, draw(st.sampled_from([16, 32, 64])) if axis == "channel" else size)
    kind = draw(st.sampled_from(["dense", 8, 4, 2]))
    v = kind if kind == "dense" else (kind, "token", size)
    return dict(dtype=dtype, dim=dim, n=n, k=k, v=v, heads=draw(st.integers(1, 8)), queries=draw(st.sampled_from([1, 2, 5])),
                tail=draw(st.sampled_from([0, 0, 1, 20])), splits=draw(st.sampled_from([1, 3, None])), masked=draw(st.booleans()))  # fmt: skip


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_shape(case):
    dtype, n, dim, tail = case["dtype"], case["n"], case["dim"], case["tail"]
    q = query(1, case["heads"], case["queries"], dim, dtype=dtype)
    bias = (
        torch.randn(1, 1, case["queries"], n + tail).masked_fill(torch.rand(n + tail) < 0.4, -torch.inf)
        if case["masked"]
        else None
    )
    rest = [query(1, 1, tail, dim, dtype=dtype) for _ in range(2)] if tail else [None, None]
    run(q, side(n, dim, dtype, case["k"]), side(n, dim, dtype, case["v"]), bias=bias, splits=case["splits"],
        residual_k=rest[0], residual_v=rest[1], settings=launch.Settings(block_n=64))  # fmt: skip


CODES = ((4, "channel", 16), (8, "token", 32))


def small(dtype=torch.float32, n=40, batch=2, heads=2, **options):
    return [side(n, 32, dtype, kind, heads, batch, **options) for kind in CODES]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_group_table(bits):
    q = query(2, 4, 1, 32, dtype=torch.float16)
    k = random_codes(2, 2, 40, 32, bits, "channel", 16, table=True)
    run(q, k, small(torch.float16)[1], splits=2, settings=SMALL)


@pytest.mark.parametrize("shape", [(2, 2, 3, 40), (1, 2, 1, 40), (2, 1, 3, 40), (1, 1, 1, 40)])
def test_bias_of_every_shape(shape):
    run(query(2, 4, 3, 32), *small(), bias=torch.randn(shape), settings=SMALL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap_sinks_and_tail(dtype):
    q = query(2, 4, 2, 32, dtype=dtype) * 6
    rest = query(2, 2, 7, 32, dtype=dtype), query(2, 2, 7, 32, dtype=dtype)
    run(q, *small(dtype), softcap=5.0, sinks=torch.randn(4).to(dtype), residual_k=rest[0], residual_v=rest[1], settings=SMALL)


def test_softcap_by_hand():
    """One key, so the output is its value and the log-sum-exp is the capped score: 2 * tanh(8 / 2)."""
    q, k, v = torch.full((1, 1, 1, 16), 1.0), torch.full((1, 1, 1, 16), 0.5), torch.arange(16.0).view(1, 1, 1, 16)
    out, lse = decode_attention(q, k, v, scaling=1.0, softcap=2.0)
    assert torch.allclose(out, v) and lse.item() == pytest.approx(1.998659, abs=1e-5)


def test_sink_takes_its_share():
    """Four equal keys and a sink of the same score: a fifth of the mass is the sink's."""
    q, k, v = torch.zeros(1, 1, 1, 16), torch.randn(1, 1, 4, 16), torch.ones(1, 1, 4, 16)
    out, lse = decode_attention(q, k, v, scaling=1.0, sinks=torch.zeros(1))
    assert torch.allclose(out, torch.full_like(out, 0.8)) and lse.item() == pytest.approx(1.609438, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype, poison):
    q = query(2, 4, 2, 32, dtype=dtype)
    bias = torch.zeros(2, 1, 2, 40)
    bias[0] = -torch.inf  # all of row 0
    bias[1, :, 1] = -torch.inf  # one query of row 1
    out, lse = run(q, *small(dtype), bias=bias, splits=3, settings=SMALL)
    assert (
        not out[0].any() and (lse[0] == -torch.inf).all() and (lse[1, :, 1] == -torch.inf).all() and lse[1, :, 0].isfinite().all()
    )
    out, lse = run(q, *small(dtype), bias=bias, sinks=torch.ones(4), splits=3, settings=SMALL)
    assert not out[0].any() and torch.allclose(lse[0], torch.ones(()))


def test_splits_that_hold_or_see_nothing(poison):
    bias = torch.zeros(1, 1, 1, 40)
    bias[..., :16] = -torch.inf  # the first split is masked from end to end
    run(query(2, 4, 1, 32), *small(), bias=bias, splits=3, settings=SMALL)
    run(query(2, 4, 1, 32), *small(n=3), splits=7, settings=SMALL)


def test_length(poison):
    q, (k, v) = query(2, 4, 1, 32), small()
    run(q, k, v, length=17, splits=2, settings=SMALL)
    rest = query(2, 2, 5, 32), query(2, 2, 5, 32)
    run(q, k, v, length=torch.tensor([0, 33]), residual_k=rest[0], residual_v=rest[1], splits=3, settings=SMALL)
    out, lse = run(q, k, v, length=torch.tensor([0, 40]), splits=3, settings=SMALL)
    assert not out[0].any() and (lse[0] == -torch.inf).all()


def test_no_tokens():
    q, empty, rest = query(1, 2, 1, 32), torch.empty(1, 1, 0, 32), query(1, 1, 3, 32)
    run(q, empty, empty)
    run(q, empty, empty, residual_k=rest, residual_v=rest)
    run(q, rest, rest, residual_k=empty, residual_v=empty)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_views_of_a_larger_cache(dtype):
    """Only the first tokens of the storage count; what lies behind them is NaN and must not be touched."""
    q = query(2, 4, 1, 32, dtype=dtype)
    run(q, *small(dtype, n=37, capacity=64), splits=2, settings=SMALL)
    dense = torch.full((2, 64, 2, 32), torch.nan, dtype=dtype)  # [B, N, H, D], read as [B, H, N, D]
    dense[:, :37] = query(2, 37, 2, 32, dtype=dtype)
    run(
        q.transpose(1, 2).contiguous().transpose(1, 2),
        dense.transpose(1, 2)[:, :, :37],
        dense.transpose(1, 2)[:, :, :37],
        settings=SMALL,
    )


def test_odd_offsets_and_float32_scales():
    """Rows that start at odd bytes cannot be read as words of two; the byte path must be as right."""
    k, v = small(scale_dtype=torch.float32)

    def shift(x):
        storage = torch.zeros(x.codes.numel() + 1, dtype=torch.uint8)
        codes = storage[1:].view(x.codes.shape)
        codes.copy_(x.codes)
        return Codes(codes, x.scale, x.zero, x.bits, x.axis, x.group_size)

    for dtype in (torch.float32, torch.float16):
        run(query(2, 4, 1, 32, dtype=dtype), shift(k), shift(v), splits=2, settings=SMALL)
        run(query(2, 4, 1, 32, dtype=dtype), k, v, splits=2, settings=SMALL)


@pytest.mark.parametrize("k_factor, v_factor", [(3e3, 3e3), (1e-2, 1e-4)])
def test_float16_range(k_factor, v_factor):
    """Scales far from 1 must not under- or overflow float16: probabilities x scales and query x scale are normalised."""
    k, v = small(torch.bfloat16, batch=1)
    q = query(1, 4, 1, 32, dtype=torch.bfloat16) / k_factor
    k = Codes(k.codes, k.scale * k_factor, k.zero * k_factor, k.bits, k.axis, k.group_size)
    v = Codes(v.codes, v.scale * v_factor, v.zero * v_factor, v.bits, v.axis, v.group_size)
    got = decode_attention(q, k, v, scaling=0.2, settings=SMALL)
    assert error(got[0], attention(q, k, v, 0.2)[0]) < 1e-2


def test_parts_merge_by_lse():
    """Two halves, attended apart and joined by their log-sum-exp, are the whole."""
    q, k, v = query(1, 4, 1, 32), query(1, 2, 50, 32), query(1, 2, 50, 32)
    out, lse = decode_attention(q, k, v, scaling=0.2)
    halves = [decode_attention(q, k[:, :, part], v[:, :, part], scaling=0.2) for part in (slice(0, 20), slice(20, 50))]
    weights = torch.softmax(torch.stack([half[1] for half in halves]), 0)
    joined = sum(w[..., None] * half[0] for w, half in zip(weights, halves))
    assert torch.allclose(joined, out, atol=1e-6) and torch.allclose(torch.logaddexp(halves[0][1], halves[1][1]), lse, atol=1e-6)


def test_many_queries_and_heads():
    run(
        query(1, 6, 16, 32, dtype=torch.float16),
        side(40, 32, torch.float16, CODES[0]),
        side(40, 32, torch.float16, CODES[1]),
        settings=SMALL,
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=torch.zeros(1, 3, 1, 32)), "q has 3 heads, k has 2"),
        (dict(q=torch.zeros(1, 4, 17, 32)), "q has 17 queries, must be 1 to 16"),
        (dict(q=torch.zeros(1, 4, 1, 32, dtype=torch.float64)), "q is torch.float64"),
        (dict(k=torch.zeros(1, 2, 9, 32)), "k and v must agree"),
        (dict(k=torch.zeros(1, 2, 8, 16)), "k has shape"),
        (dict(k=torch.zeros(1, 2, 32, 8).mT), "k has stride 8 in its last dim"),
        (dict(softcap=0.0), "softcap=0.0 must be greater than 0"),
        (dict(splits=0), "splits=0 must be 1 to 65535"),
        (dict(length=9), "length=9 must be 0 to 8"),
        (dict(length=torch.zeros(2, dtype=torch.int32)), r"length is torch.int32 \[2\]"),
        (dict(bias=torch.zeros(1, 1, 1, 9)), r"bias is torch.float32 \[1, 1, 1, 9\]"),
        (dict(sinks=torch.zeros(3)), r"sinks has shape \[3\], must be \[4\]"),
        (dict(residual_k=torch.zeros(1, 2, 1, 32)), "must be given together"),
        (dict(v=random_codes(1, 2, 8, 32, 8, "channel", 8)), "v has axis='channel', must be 'token'"),
        (dict(v=random_codes(1, 2, 8, 16, 8, "token", 8)), r"v.codes is torch.uint8 \[1, 2, 8, 16\]"),
    ],
)
def test_refuses(change, message):
    arguments = dict(q=torch.zeros(1, 4, 1, 32), k=torch.zeros(1, 2, 8, 32), v=torch.zeros(1, 2, 8, 32), scaling=1.0) | change
    with pytest.raises(ValueError, match=message):
        decode_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_refuses_broken_codes():
    good = random_codes(1, 2, 16, 32, 4, "token", 16)
    q, v = torch.zeros(1, 4, 1, 32), torch.zeros(1, 2, 16, 32)
    for name, value, message in [
        ("bits", 5, "bits=5"),
        ("format", "float", "format='float'"),
        ("axis", "row", "axis='row'"),
        ("scale", good.scale.double(), "k.scale is torch.float64"),
        ("scale", good.scale[:, :, 1:], "k.scale is torch.float16"),
        ("group_size", 7, "group_size=7"),
        ("zero", good.zero.mT.contiguous().mT, "stride"),
        ("group", torch.zeros(1, 2, 15, dtype=torch.int32), "k.group is torch.int32"),
    ]:
        fields = {**good.__dict__, name: value}
        with pytest.raises(ValueError, match=message):
            decode_attention(q, Codes(**fields), v, scaling=1.0)
