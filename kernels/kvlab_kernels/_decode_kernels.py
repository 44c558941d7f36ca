"""The Triton kernels of :mod:`kvlab_kernels.decode`. Importing this needs triton; the host code imports it on the first call.

Shapes inside a program (one batch row, one KV head, one range of tokens)::

    words   [BLOCK_N, W]   a tile of the cache; a word is one or two bytes of codes, or one dense element
    fields  codes of a word: word >> shift & mask; field f of chunk c is "part" c * fields + f, a strided set of channels
    q       [W, M]         one tensor a part; M = query heads of the group x queries, padded (8 is the width of an MMA)
    scores  [BLOCK_N, M] = sum over parts of field @ q[part]
    acc     [W, M]         one tensor a part: field.T @ probabilities

The cache is the *left* operand of both products. The few queries are then padded to 8 columns, not to 16 rows, and the codes
go from shared memory to the registers of the tensor cores as 16-bit words, where they are unpacked two at a time.

``K`` and ``V`` are :class:`kvlab_kernels.decode.Reading`: compile-time constants that say how a cache is read. Where tokens lie in pages, a tile's
page is looked up one tile ahead, in the block table of its batch row and head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._reading_kernels import _fetch, _page, _scores, _values, channel, gain, group_of, lifted

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _query(q_base, live, scaling, K: tl.constexpr, M: tl.constexpr, SOFTCAP: tl.constexpr):
    """The query, one tensor a part; its sums over each scale group; what lifted parts give too much; and the unit of the scores that come out.

    Against codes in float16 it is first divided by a power of two (exact), so that no product overflows.
    """
    K_PARTS: tl.constexpr = K.parts
    K_GROUPS: tl.constexpr = K.groups
    w = tl.arange(0, K.padded)
    top = tl.zeros([M], tl.float32)
    q32 = ()
    for part in tl.static_range(K_PARTS):
        x = tl.load(
            q_base[None, :] + (channel(K, part) + w * K.word)[:, None], mask=live[None, :] & (w < K.width)[:, None], other=0.0
        )
        q32 = q32 + (x.to(tl.float32),)
        top = tl.maximum(top, tl.max(tl.abs(q32[part]), 0))
    unit = tl.zeros([M], tl.float32) + (scaling if SOFTCAP else scaling * LOG2E)
    inverse = tl.full([M], 1.0, tl.float32)
    if K.half:
        exponent = top.to(tl.int32, bitcast=True) >> 23
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = unit * (exponent << 23).to(tl.float32, bitcast=True)
    q = ()
    for part in tl.static_range(K_PARTS):
        q = q + ((q32[part] * inverse[None, :]).to(K.dot),)
    q_sum = ()
    q_lift = ()
    if K.kind == "token":
        for g in tl.static_range(K_GROUPS):
            total = tl.zeros([M], tl.float32)
            lift = tl.zeros([M], tl.float32)
            for part in tl.static_range(K_PARTS):
                if group_of(K, part) == g:
                    part_sum = tl.sum(q[part].to(tl.float32), 0)
                    total += part_sum
                    if lifted(part, K.bits, K.lift):
                        lift += part_sum * (1024.0 / gain(part, K.bits, K.lift))
            q_sum = q_sum + (total,)
            q_lift = q_lift + (lift,)
    return q, q_sum, q_lift, unit


@triton.jit
def _logits(s, n0, rows, ok, unit, bias, bias_n, cap, SOFTCAP: tl.constexpr):
    """Scores as products -> times log2(e), soft-capped, with their bias; -inf where nothing counts."""
    s = s * unit[None, :]
    if SOFTCAP:
        t = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / cap))
        s = tl.where(s < 0, -LOG2E, LOG2E) * cap * ((1.0 - t) / (1.0 + t))
    if bias is not None:
        s += tl.load(bias + (n0 + rows).to(tl.int64)[:, None] * bias_n, mask=ok[:, None], other=0.0).to(tl.float32) * LOG2E
    return tl.where(ok[:, None], s, float("-inf"))


@triton.jit
def _counted(n0, rows, hi, first, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which tokens of a tile count; WHOLE: all, which is known to the compiler, so that it drops the masks."""
    if WHOLE:
        return tl.full([BLOCK_N], 1, tl.int1)
    elif first is not None:
        return (n0 + rows < hi) & (n0 + rows >= first)
    else:
        return n0 + rows < hi


@triton.jit
def _attend(
    lo, hi, first, pages, k, v, k_scale, k_zero, k_table, table_n, k_levels, v_scale, v_zero, v_levels, waves, places, place_n, place_first,
    bias, bias_n, cap, scaling, q_base, live, out, lse,
    K: tl.constexpr, V: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attention over the tokens ``lo .. hi``, those before ``first`` (or None) apart, normalised, with its log2-sum-exp, written to ``out`` [M] rows and ``lse`` [M].

    WHOLE: ``hi - lo`` is a multiple of BLOCK_N, so no tile needs masks.
    """
    V_PARTS: tl.constexpr = V.parts
    VP: tl.constexpr = V.padded
    V_GROUPS: tl.constexpr = V.groups
    rows = tl.arange(0, BLOCK_N)
    q, q_sum, q_lift, unit = _query(q_base, live, scaling, K, M, SOFTCAP)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    e = 0
    acc = ()
    for _ in tl.static_range(V_PARTS):
        acc = acc + (tl.zeros([VP, M], tl.float32),)
    z = ()
    if V.kind == "token" and V.zeros:
        for _ in tl.static_range(V_GROUPS):
            z = z + (tl.zeros([M], tl.float32),)

    page = _page(pages, lo, rows, hi, first, K.page, BLOCK_N)
    ks, kz, vs, vz = _fetch(lo, hi, first, rows, page, k_scale, k_zero, v_scale, v_zero, K, V, WHOLE, BLOCK_N)
    for n0 in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        page1 = _page(pages, n0 + BLOCK_N, rows, hi, first, K.page, BLOCK_N)
        ks1, kz1, vs1, vz1 = _fetch(n0 + BLOCK_N, hi, first, rows, page1, k_scale, k_zero, v_scale, v_zero, K, V, WHOLE, BLOCK_N)
        ok = _counted(n0, rows, hi, first, WHOLE, BLOCK_N)
        s = _scores(n0, rows, ok, page, k, k_scale, k_zero, k_table, table_n, k_levels, waves, places, place_n, place_first, q, q_sum, q_lift, ks, kz,
                    K, M, BLOCK_N)  # fmt: skip
        s = _logits(s, n0, rows, ok, unit, bias, bias_n, cap, SOFTCAP)
        m_new = tl.maximum(m, tl.max(s, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a block in which nothing may be seen: exp2(-inf), not exp2(nan)
        p = tl.exp2(s - m_safe[None, :])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 0)
        m = m_new
        acc, z, e = _values(n0, rows, ok, page, v, v_levels, p, alpha, acc, z, e, vs, vz, V, BLOCK_N)
        ks, kz, vs, vz = ks1, kz1, vs1, vz1
        page = page1

    r = tl.where(l > 0, 1.0, 0.0) / tl.where(l > 0, l, 1.0)
    unit_v = 1.0
    if V.kind == "token" and V.half:
        unit_v = (e << 23).to(tl.float32, bitcast=True)
    w = tl.arange(0, V.padded)
    for part in tl.static_range(V_PARTS):
        x = acc[part] * unit_v
        if V.kind == "token" and V.zeros:
            x += z[group_of(V, part)][None, :]
        tl.store(
            out[None, :] + (channel(V, part) + w * V.word)[:, None], x * r[None, :], mask=live[None, :] & (w < V.width)[:, None]
        )
    tl.store(lse, tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), float("-inf")), mask=live)


@triton.jit
def _weigh(
    lo, hi, first, pages, k, k_scale, k_zero, k_table, table_n, k_levels, waves, places, place_n, place_first, bias, bias_n, cap, scaling, q_base, live,
    total, mass,
    K: tl.constexpr, NONE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What the queries give each of the tokens ``lo .. hi``, their log2-sum-exp ``total`` [M] being known."""
    rows = tl.arange(0, BLOCK_N)
    q, q_sum, q_lift, unit = _query(q_base, live, scaling, K, M, SOFTCAP)
    for n0 in tl.range(lo, hi, BLOCK_N):
        page = _page(pages, n0, rows, hi, first, K.page, BLOCK_N)
        ks, kz, _, _ = _fetch(n0, hi, first, rows, page, k_scale, k_zero, None, None, K, NONE, WHOLE, BLOCK_N)
        ok = _counted(n0, rows, hi, first, WHOLE, BLOCK_N)
        s = _scores(n0, rows, ok, page, k, k_scale, k_zero, k_table, table_n, k_levels, waves, places, place_n, place_first, q, q_sum, q_lift, ks, kz,
                    K, M, BLOCK_N)  # fmt: skip
        s = _logits(s, n0, rows, ok, unit, bias, bias_n, cap, SOFTCAP)
        p = tl.where(live[None, :], tl.exp2(s - tl.where(total == float("-inf"), 0.0, total)[None, :]), 0.0)
        tl.store(mass + (n0 + rows).to(tl.int64), tl.sum(p, 1), mask=n0 + rows < hi)


@triton.jit
def _own(bias, i, bias_q, Q: tl.constexpr):
    """The bias of each of the query rows ``i``, as a row to which the tokens' steps are added; None where there is none."""
    if bias is None:
        return None
    else:
        return bias + ((i % Q) * bias_q)[None, :]


# Numbers that change from step to step, and strides whose alignment ``Reading.align`` tells, are not specialized on: neither their being 1
# nor their being a multiple of 16 compiles the kernel again.
INTEGERS = """n tail_n split_tiles splits parts kv_heads rows_m q_b q_h q_n k_b k_h v_b v_h ks_b ks_h table_b table_h table_n vs_b vs_h
tk_b tk_h tv_b tv_h bias_b bias_h bias_q bias_n bias_tail pages_b pages_h length_b length_h start_b start_h place_b place_h place_n
place_first since""".split()  # noqa: SIM905


@triton.jit(do_not_specialize=INTEGERS)
def decode_split(
    q, k, k_scale, k_zero, k_table, k_levels, v, v_scale, v_zero, v_levels, tail_k, tail_v, bias, pages, length, start, waves, places,
    part_out, part_lse, scaling, cap,
    n, tail_n, split_tiles, splits, parts, kv_heads, rows_m, q_b, q_h, q_n, k_b, k_h, v_b, v_h, ks_b, ks_h, table_b, table_h, table_n,
    vs_b, vs_h, tk_b, tk_h, tv_b, tv_h, bias_b, bias_h, bias_q, bias_n, bias_tail, pages_b, pages_h, length_b, length_h, start_b, start_h,
    place_b, place_h, place_n, place_first, since,
    K: tl.constexpr, V: tl.constexpr, TK: tl.constexpr, TV: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """Partial attention of one KV head over one split of its tokens; the last split of all is the dense tail.

    Batch and head strides of k, v and the tail come divided by their ``align``, so that the compiler knows how far they are aligned. Where tokens lie
    in pages, batch strides of k, v and their scales are 0: the block table ``pages`` has a row for each.

    MASS: the second pass, in which every key is told what the queries from ``since`` on gave it. ``part_lse`` is then the log-sum-exp of the whole,
    ``part_out`` where the mass goes, zeros, one for each block of query rows.
    """
    blocks = tl.cdiv(rows_m, M)
    bh = tl.program_id(0) // blocks
    split = tl.program_id(1)
    b = (bh // kv_heads).to(tl.int64)
    h = (bh % kv_heads).to(tl.int64)
    end = n
    first = None
    if length is not None:
        end = tl.minimum(n, tl.load(length + b * length_b + h * length_h).to(tl.int32))
    lo = split * split_tiles * BLOCK_N
    hi = tl.maximum(tl.minimum(lo + split_tiles * BLOCK_N, end), lo)
    if start is not None:
        first = tl.load(start + b * start_b + h * start_h).to(tl.int32)
        lo = tl.minimum(tl.maximum(lo, tl.maximum(first, 0) // BLOCK_N * BLOCK_N), hi)  # tiles that nobody sees are not read
    if K.kind != "dense":
        k_scale = k_scale + b * ks_b + h * ks_h
    if K.zeros:
        k_zero = k_zero + b * ks_b + h * ks_h
    if k_table is not None:
        k_table = k_table + b * table_b + h * table_h
    if V.kind != "dense":
        v_scale = v_scale + b * vs_b + h * vs_h
    if V.zeros:
        v_zero = v_zero + b * vs_b + h * vs_h
    if pages is not None:
        pages = pages + b * pages_b + h * pages_h
    if places is not None:
        places = places + b * place_b + h * place_h
    k = k + (b * k_b + h * k_h) * K.align
    v = v + (b * v_b + h * v_h) * V.align
    if TK is not None:
        tail_k = tail_k + (b * tk_b + h * tk_h) * TK.align
        tail_v = tail_v + (b * tv_b + h * tv_h) * TV.align
    if bias is not None:
        bias = bias + b * bias_b + h * bias_h
    tail_bias = bias
    if bias is not None:
        tail_bias = bias + (bias_tail + tl.zeros([], tl.int64)) * bias_n
    block = tl.program_id(0) % blocks
    i = block * M + tl.arange(0, M)
    live = i < rows_m
    q_base = q + b * q_b + (h * (rows_m // Q) + i // Q) * q_h + (i % Q) * q_n
    row = (b * kv_heads + h) * rows_m + i
    if MASS:
        total = tl.load(part_lse + row, mask=live, other=0.0) * LOG2E
        live = live & (i % Q >= since)
        mass = part_out + (block * (tl.num_programs(0) // blocks) + b * kv_heads + h) * (bias_tail + tail_n)
        if split < splits:
            _weigh(lo, hi, first, pages, k, k_scale, k_zero, k_table, table_n, k_levels, waves, places, place_n, place_first,
                   _own(bias, i, bias_q, Q), bias_n, cap, scaling, q_base, live, total, mass, K, V, M, BLOCK_N, SOFTCAP, WHOLE)  # fmt: skip
        elif TK is not None:
            _weigh(0, tail_n, None, None, tail_k, None, None, None, 0, None, None, None, 0, 0,
                   _own(tail_bias, i, bias_q, Q), bias_n, cap, scaling, q_base, live, total, mass + bias_tail, TK, V, M, BLOCK_N, SOFTCAP, False)  # fmt: skip
    else:
        out = part_out + (row * parts + split) * D
        lse = part_lse + row * parts + split
        if split < splits:
            _attend(lo, hi, first, pages, k, v, k_scale, k_zero, k_table, table_n, k_levels, v_scale, v_zero, v_levels, waves, places, place_n, place_first,
                    _own(bias, i, bias_q, Q), bias_n, cap, scaling, q_base, live, out, lse, K, V, M, BLOCK_N, STAGES, SOFTCAP, WHOLE)  # fmt: skip
        elif TK is not None:
            _attend(0, tail_n, None, None, tail_k, tail_v, None, None, None, 0, None, None, None, None, None, None, 0, 0,
                    _own(tail_bias, i, bias_q, Q), bias_n, cap, scaling, q_base, live, out, lse, TK, TV, M, BLOCK_N, 1, SOFTCAP, False)  # fmt: skip


@triton.jit(do_not_specialize=["parts", "heads", "queries"])
def decode_merge(
    part_out, part_lse, sinks, out, lse, parts, heads, queries, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Join the partial results of one query by their log2-sum-exp; a sink joins the sum only."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    p = tl.arange(0, BLOCK_P)
    part_lse += row * parts
    part_out += row * parts * D
    top = tl.full([BLOCK_P], float("-inf"), tl.float32)
    for p0 in range(0, parts, BLOCK_P):
        top = tl.maximum(top, tl.load(part_lse + p0 + p, mask=p0 + p < parts, other=float("-inf")))
    m = tl.max(top, 0)
    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + (row // queries) % heads).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    total = tl.zeros([BLOCK_P], tl.float32)
    acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for p0 in range(0, parts, BLOCK_P):
        weight = tl.exp2(tl.load(part_lse + p0 + p, mask=p0 + p < parts, other=float("-inf")) - m_safe)
        total += weight
        x = tl.load(part_out + (p0 + p)[:, None] * D + d[None, :], mask=(p0 + p < parts)[:, None] & (d < D)[None, :], other=0.0)
        acc += weight[:, None] * x
    l = tl.sum(total, 0) + tl.exp2(sink - m_safe)
    some = l > 0
    l = tl.where(some, l, 1.0)
    x = tl.where(some, tl.sum(acc, 0) / l, 0.0)
    tl.store(out + row * D + d, x.to(out.dtype.element_ty), mask=d < D)
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(some, (m + tl.log2(l)) * LN2, float("-inf")))
