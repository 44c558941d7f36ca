"""The Triton kernels of :mod:`kvlab_kernels.scored`."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PRECISION = tl.constexpr("tf32x3")  # float32 products as three TF32 ones, as in the decode kernels


@triton.jit
def _logits(queries, keys, scaling, cap, SOFTCAP: tl.constexpr):
    """``queries @ keys.T`` in float32, times log2(e): [M, N]."""
    s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
    if SOFTCAP:
        t = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / cap))
        s = tl.where(s < 0, -cap, cap) * ((1.0 - t) / (1.0 + t))
    return s * LOG2E


@triton.jit
def _tile(base, rows, live, stride, d, D: tl.constexpr, DOT: tl.constexpr):
    """Rows of keys, values or queries, [rows, padded D]; what is not live, or behind D, is 0."""
    at = base + rows.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(at, mask=live[:, None] & (d < D)[None, :], other=0.0).to(DOT)


@triton.jit(do_not_specialize=["queries", "tokens", "heads", "window"])
def scored_forward(
    q, k, v, sinks, first, out, lse, scaling, cap, queries, tokens, heads, window,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    GROUP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """M queries of one head: output and log-sum-exp (FlashAttention-2, arXiv 2307.08691)."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, P)
    live = i < queries
    own = i + tokens - queries  # the token that each query is
    x = _tile(q + b * q_b + h * q_h, i, live, q_n, d, D, DOT)
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h // GROUP * v_h
    start = 0
    if first is not None:
        start = tl.load(first + b).to(tl.int32)
    lo = tl.maximum(start, tl.program_id(0) * M + tokens - queries - window + 1)
    hi = tl.minimum(tokens, tl.program_id(0) * M + M + tokens - queries)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, P], tl.float32)
    for n0 in range(lo // N * N, hi, N):
        n = n0 + tl.arange(0, N)
        inside = (n < tokens) & (n >= start)
        s = _logits(x, _tile(k, n, inside, k_n, d, D, DOT), scaling, cap, SOFTCAP)
        seen = inside[None, :] & (n[None, :] <= own[:, None]) & (n[None, :] > own[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(m - safe)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(DOT), _tile(v, n, inside, v_n, d, D, DOT), acc, input_precision=PRECISION)
        m = top
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.exp2(sink - top)
        acc = acc * shrink[:, None]
        m = top
    some = l > 0
    divisor = tl.where(some, l, 1.0)
    row = (tl.program_id(1).to(tl.int64) * queries + i) * D
    x = tl.where(some[:, None], acc / divisor[:, None], 0.0)
    tl.store(out + row[:, None] + d[None, :], x.to(out.dtype.element_ty), mask=live[:, None] & (d < D)[None, :])
    sums = tl.where(some, (m + tl.log2(divisor)) * LN2, float("-inf"))
    tl.store(lse + tl.program_id(1).to(tl.int64) * queries + i, sums, mask=live)


@triton.jit(do_not_specialize=["queries", "tokens", "kv_heads", "window", "since"])
def scored_mass(
    q, k, lse, first, mass, scaling, cap, queries, tokens, kv_heads, window, since, q_b, q_h, q_n, k_b, k_h, k_n,
    GROUP: tl.constexpr, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """N keys of one KV head: the weights that all queries of its group give each, added up. The second pass, for which the log-sum-exp is known:
    every key has one program, so nothing is added up in an order that chance decides."""
    b = (tl.program_id(1) // kv_heads).to(tl.int64)
    h = (tl.program_id(1) % kv_heads).to(tl.int64)
    n0 = tl.program_id(0) * N
    n = n0 + tl.arange(0, N)
    d = tl.arange(0, P)
    start = 0
    if first is not None:
        start = tl.load(first + b).to(tl.int32)
    inside = (n < tokens) & (n >= start)
    keys = _tile(k + b * k_b + h * k_h, n, inside, k_n, d, D, DOT)
    lo = tl.maximum(since, n0 - tokens + queries)
    hi = tl.minimum(queries, n0 + N - 1 + window - tokens + queries)
    total = tl.zeros([N], tl.float32)
    for member in tl.static_range(GROUP):
        head = h * GROUP + member
        base = q + b * q_b + head * q_h
        sums = lse + (b * kv_heads * GROUP + head) * queries
        for m0 in range(tl.maximum(lo, 0) // M * M, hi, M):
            i = m0 + tl.arange(0, M)
            live = (i < queries) & (i >= since)
            own = i + tokens - queries
            s = _logits(_tile(base, i, live, q_n, d, D, DOT), keys, scaling, cap, SOFTCAP)
            e = tl.load(sums + i, mask=live, other=0.0) * LOG2E
            seen = live[:, None] & inside[None, :] & (n[None, :] <= own[:, None]) & (n[None, :] > own[:, None] - window)
            p = tl.where(seen, tl.exp2(s - tl.where(e == float("-inf"), 0.0, e)[:, None]), 0.0)
            total += tl.sum(p, 0)
    tl.store(mass + tl.program_id(1).to(tl.int64) * tokens + n, total, mask=n < tokens)
