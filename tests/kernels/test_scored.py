"""Attention with its column sums: against a matrix of weights in float64, through the interpreter and in torch."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlab_kernels.scored import scored_attention, scored_torch
from tests.kernels.kernel_oracle import TOLERANCE, check, error


def oracle(q, k, v, scaling, softcap=None, sinks=None, window=None, first=None, since=0):
    """-> (out, lse), mass in float64: the whole matrix of weights of each head."""
    (batch, heads, queries, _), (_, kv_heads, tokens, _) = q.shape, k.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    mass = torch.zeros(batch, kv_heads, tokens, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            kv = head // (heads // kv_heads)
            s = q[b, head].double() @ k[b, kv].double().T * scaling
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            for i in range(queries):
                own = i + tokens - queries
                hidden = [
                    n > own or (window and n <= own - window) or (first is not None and n < first[b]) for n in range(tokens)
                ]
                row = s[i].masked_fill(torch.tensor(hidden), -torch.inf)
                both = row if sinks is None else torch.cat([row, sinks[head].double()[None]])
                if both.max() > -torch.inf:
                    lse[b, head, i] = both.logsumexp(0)
                    weights = (row - lse[b, head, i]).exp()
                    out[b, head, i] = weights @ v[b, kv].double()
                    if i >= since:
                        mass[b, kv] += weights
    return (out, lse), mass


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 8]))
    queries = draw(st.integers(1, 100))
    tokens = queries + draw(st.sampled_from([0, 0, 1, 40, 120]))
    options = {}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([2.0, 30.0]))
    if draw(st.booleans()):
        options["window"] = draw(st.integers(1, tokens + 3))
    if draw(st.booleans()):
        options["sinks"] = torch.randn(kv_heads * group)
    if draw(st.booleans()):
        options["first"] = torch.tensor([draw(st.integers(0, tokens)) for _ in range(batch)])
    options["since"] = draw(st.integers(0, queries))
    return dtype, batch, kv_heads, group, queries, tokens, draw(st.sampled_from([16, 64, 80, 96, 128])), options


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(cases())
def test_against_a_matrix(case):
    dtype, batch, kv_heads, group, queries, tokens, dim, options = case
    q = torch.randn(batch, kv_heads * group, queries, dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, tokens, dim).to(dtype) for _ in range(2))
    want, mass = oracle(q, k, v, dim**-0.5, **options)
    for way in (scored_attention, scored_torch):
        *got, seen = way(q, k, v, scaling=dim**-0.5, **options)
        check(got, want, dtype)
        assert error(seen, mass) < TOLERANCE[dtype] and seen.dtype == torch.float32


@pytest.mark.usefixtures("poison")
def test_everything_is_written_and_adds_up():
    """Full causality, no sinks: each query gives one whole weight; strided views; a key that nobody may see has exactly none."""
    whole = torch.randn(2, 6, 40, 3 * 64)
    q, k, v = whole[..., :64], whole[:, :3, :, 64:128], whole[:, :3, :, 128:]
    out, lse, mass = scored_attention(q, k, v, scaling=0.125)
    assert out.isfinite().all() and lse.isfinite().all()
    torch.testing.assert_close(mass.sum(2), torch.full((2, 3), 2.0 * 40))
    *_, last = scored_attention(q, k, v, scaling=0.125, since=40)
    assert not last.any()
    *_, early = scored_attention(q, k, v, scaling=0.125, first=torch.tensor([0, 12]))
    assert not early[1, :, :12].any() and early[0, :, :12].all()


def test_evidence_does_not_know_the_future():
    """The mass of a prefix, from its own queries, is the same whatever follows."""
    q, k, v = (torch.randn(1, 2, 90, 32) for _ in range(3))
    *_, all_of_it = scored_attention(q, k, v, scaling=0.2)
    *_, prefix = scored_attention(q[:, :, :60], k[:, :, :60], v[:, :, :60], scaling=0.2)
    *_, rest = scored_attention(q[:, :, 60:], k, v, scaling=0.2)
    torch.testing.assert_close(all_of_it - rest, torch.cat([prefix, torch.zeros(1, 2, 30)], 2), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_named():
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 9, 16)
    for wrong, words in [
        ({"since": 6}, "since=6 must be 0 to 5"),
        ({"window": 0}, "window=0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"sinks": torch.zeros(2)}, r"sinks has shape \[2\], must be \[4\]"),
        ({"first": torch.zeros(1)}, "first is torch.float32"),
        ({"k": k[:, :, :4], "v": k[:, :, :4]}, "k has 4 tokens, must have at least the 5"),
        ({"k": k.half()}, "k is torch.float16"),
        ({"v": k[:, :, :8]}, "must have one shape"),
        ({"q": torch.randn(1, 3, 5, 16)}, "3 heads, k has 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            scored_attention(**({"q": q, "k": k, "v": k, "scaling": 1.0} | wrong))
