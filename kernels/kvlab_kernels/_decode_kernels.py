"""The Triton kernels of :mod:`kvlab_kernels.decode`. Importing this needs triton; the host code imports it on the first call.

Shapes inside a program (one batch row, one KV head, one range of tokens)::

    words   [BLOCK_N, W]   a tile of the cache; a word is one or two bytes of codes, or one dense element
    fields  codes of a word: word >> shift & mask; field f of chunk c is "part" c * FIELDS + f, a strided set of channels
    q       [W, M]         one tensor a part; M = query heads of the group x queries, padded (8 is the width of an MMA)
    scores  [BLOCK_N, M] = sum over parts of field @ q[part]
    acc     [W, M]         one tensor a part: field.T @ probabilities

The cache is the *left* operand of both products. The few queries are then padded to 8 columns, not to 16 rows, and the codes
go from shared memory to the registers of the tensor cores as 16-bit words, where they are unpacked two at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# float32 products as three TF32 ones: float32 accuracy (2**-21) on tensor cores, and a fraction of the registers of plain float32.
PRECISION = tl.constexpr("tf32x3")


@triton.constexpr_function
def part_count(head_dim, bits, word, chunk):
    """How many parts a row of codes has: chunks of ``chunk`` bytes x fields of a word of ``word`` bytes."""
    return head_dim * bits // 8 // chunk * (8 * word // bits)


@triton.constexpr_function
def part_channel(part, head_dim, bits, word, chunk):
    """The first channel of a part; the next ones follow at steps of ``word``. See :mod:`kvlab_kernels.layout`."""
    chunk_index, field = divmod(part, 8 * word // bits)
    return field * bits % 8 // bits * (head_dim * bits // 8) + chunk_index * chunk + field * bits // 8


@triton.constexpr_function
def lifted(part, bits, word, half):
    """Whether a part of the keys is multiplied as it is unpacked, ``1024 + c * 2**low``, and the 1024 is taken off the score.

    Only in float16, and only where 1024 is at most four times the range of the codes: more would cost precision. Not for values: over
    thousands of tokens the 1024 would drown in the rounding of the sum what the codes have to say.
    """
    return half and word == 2 and 1024 >> part % (16 // bits) * bits % 8 <= 4 << bits


@triton.constexpr_function
def gain(part, bits, word, half):
    """What a part's codes are multiplied by: ``2**low``, the place of the lowest bit in its byte, or 1."""
    return 2.0 ** (part % (16 // bits) * bits % 8) if lifted(part, bits, word, half) else 1.0


@triton.constexpr_function
def unpack_asm(part, bits, lift, middle):
    """PTX: two 16-bit words -> two float16 codes, less ``middle``.

    ``0x6400 | c`` is 1024 + c in float16 (c < 1024), so no integer is converted; one multiply-add takes the 1024 off again.
    """
    shift = part % (16 // bits) * bits
    low = shift % 8
    mask = ((1 << bits) - 1) << low
    body = f"lop3.b32 t, $1, {mask << 16 | mask:#x}, 0x64006400, 0xEA;"  # and, then or
    if bits == 8 and shift:
        body = "prmt.b32 t, $1, 0x64646464, 0x4341;"
    elif shift >= 8:
        body = "shr.b32 t, $1, 8; " + body.replace("$1", "t")
    scale = ((15 - low) << 10) * 0x10001  # 2**-low, twice in float16
    offset = (0x8000 | (25 - low) << 10 | middle << low) * 0x10001  # -(2**(10 - low) + middle)
    if lifted(part, bits, 2, lift):
        body += " mov.b32 $0, t;"
    elif low == 0:
        body += f" mov.b32 u, {offset:#x}; add.rn.f16x2 $0, t, u;"
    else:
        body += f" mov.b32 u, {scale:#x}; mov.b32 w, {offset:#x}; fma.rn.f16x2 $0, t, u, w;"
    return "{ .reg .b32 t, u, w; " + body + " }"


@triton.jit
def _field(
    words,
    PART: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    CODES: tl.constexpr,
    FAST: tl.constexpr,
    DOT: tl.constexpr,
    LIFT: tl.constexpr,
    MIDDLE: tl.constexpr,
):
    """The values of one part of a tile, exact in DOT: codes as integers (lifted, or less MIDDLE), dense elements as they are."""
    if not CODES:
        return words.to(DOT)
    elif FAST:
        asm: tl.constexpr = unpack_asm(PART, BITS, LIFT, MIDDLE)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        c = ((words.to(tl.int32) >> PART % (8 * WORD // BITS) * BITS) & (2**BITS - 1)).to(tl.float32)
        if lifted(PART, BITS, WORD, LIFT):
            c = c * gain(PART, BITS, WORD, LIFT) + 1024.0
        return (c - MIDDLE).to(DOT)


@triton.jit
def _words(
    base, rows, n0, ok, CHUNK_AT: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, WP: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """One chunk of a tile: [BLOCK_N, WP], or [WP, BLOCK_N] if TRANSPOSED."""
    w = tl.arange(0, WP)
    # The start of the tile is 64-bit, the way inside it 32-bit: caches of more than 2**31 elements are real.
    tile = base + (n0 + tl.zeros([], tl.int64)) * ROW + CHUNK_AT
    if TRANSPOSED:
        at = tile + rows[None, :] * ROW + w[:, None]
        inside = (w < W)[:, None]
        good = ok[None, :]
    else:
        at = tile + rows[:, None] * ROW + w[None, :]
        inside = (w < W)[None, :]
        good = ok[:, None]
    if W < WP:
        good = good & inside
    return tl.load(at, mask=good, other=0)


@triton.jit
def _fetch(
    n0,
    hi,
    rows,
    k_scale,
    k_zero,
    v_scale,
    v_zero,
    ks_row,
    vs_row,
    D: tl.constexpr,
    K_KIND: tl.constexpr,
    K_BITS: tl.constexpr,
    K_WORD: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_GROUP: tl.constexpr,
    KP: tl.constexpr,
    V_KIND: tl.constexpr,
    V_GROUP: tl.constexpr,
):
    """The scales and zeros of the tile at ``n0``, asked for one tile ahead of their use."""
    ks = ()
    kz = ()
    vs = ()
    vz = ()
    ok = n0 + rows < hi
    if K_KIND == "channel":
        w = tl.arange(0, KP)
        row = (n0 // K_GROUP + tl.zeros([], tl.int64)) * ks_row
        good = (w < K_CHUNK // K_WORD) & (n0 < hi)
        for part in tl.static_range(part_count(D, K_BITS, K_WORD, K_CHUNK)):
            at = row + part_channel(part, D, K_BITS, K_WORD, K_CHUNK) + w * K_WORD
            ks = ks + (tl.load(k_scale + at, mask=good, other=0.0),)
    if K_KIND == "token":
        for g in tl.static_range(D // K_GROUP):
            at = (n0 + rows).to(tl.int64) * ks_row + g
            ks = ks + (tl.load(k_scale + at, mask=ok, other=0.0),)
            kz = kz + (tl.load(k_zero + at, mask=ok, other=0.0),)
    if V_KIND == "token":
        for g in tl.static_range(D // V_GROUP):
            at = (n0 + rows).to(tl.int64) * vs_row + g
            vs = vs + (tl.load(v_scale + at, mask=ok, other=0.0),)
            vz = vz + (tl.load(v_zero + at, mask=ok, other=0.0),)
    return ks, kz, vs, vz


@triton.jit
def _group_row(
    k_zero,
    row,
    row_stride,
    D: tl.constexpr,
    BITS: tl.constexpr,
    WORD: tl.constexpr,
    CHUNK: tl.constexpr,
    KP: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The zeros of one group, a tensor a part. As pairs of float16, which are 32 bits and so come by asynchronous copies."""
    w = tl.arange(0, KP)
    inside = w < CHUNK // WORD
    base = k_zero + (row + tl.zeros([], tl.int64)) * row_stride
    parts = ()
    if PAIRS:
        base = base.to(tl.pointer_type(tl.int32))
        for plane in tl.static_range(8 // BITS):
            pair = tl.load(base + part_channel(plane, D, BITS, 1, CHUNK) // 2 + w, mask=inside, other=0)
            parts = parts + (pair,)
        halves = ()
        for part in tl.static_range(16 // BITS):
            half = parts[part * BITS % 8 // BITS] >> (part * BITS // 8 * 16)
            halves = halves + (half.to(tl.int16).to(tl.float16, bitcast=True),)
        return halves
    else:
        for part in tl.static_range(part_count(D, BITS, WORD, CHUNK)):
            parts = parts + (tl.load(base + part_channel(part, D, BITS, WORD, CHUNK) + w * WORD, mask=inside, other=0.0),)
        return parts


@triton.jit
def _scores(
    n0,
    rows,
    ok,
    k,
    k_scale,
    k_zero,
    k_table,
    ks_row,
    kt_row,
    q,
    q_sum,
    q_lift,
    ks,
    kz,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    K_KIND: tl.constexpr,
    K_BITS: tl.constexpr,
    K_WORD: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_ROW: tl.constexpr,
    KP: tl.constexpr,
    K_DOT: tl.constexpr,
    FAST: tl.constexpr,
    K_PAIRS: tl.constexpr,
):
    """``K @ q`` for one tile, [BLOCK_N, M] float32, scales and zeros included."""
    W: tl.constexpr = K_CHUNK // K_WORD
    FIELDS: tl.constexpr = 8 * K_WORD // K_BITS
    PARTS: tl.constexpr = part_count(D, K_BITS, K_WORD, K_CHUNK)
    CODES: tl.constexpr = K_KIND != "dense"
    LIFT: tl.constexpr = K_DOT == tl.float16
    words = ()
    for c in tl.static_range(PARTS // FIELDS):
        words = words + (_words(k, rows, n0, ok, c * W, K_ROW, W, KP, False),)
    s = tl.zeros([BLOCK_N, M], tl.float32)
    if K_KIND == "channel":
        # sum_d q_d (scale_d c_d + zero_d): the scale goes into the query, the zero is one more row of keys, the same for the whole group.
        zeros = _group_row(k_zero, n0 // K_GROUP, ks_row, D, K_BITS, K_WORD, K_CHUNK, KP, K_PAIRS)
        z = tl.zeros([16, M], tl.float32)
        for part in tl.static_range(PARTS):
            c = _field(words[part // FIELDS], part, K_BITS, K_WORD, CODES, FAST, K_DOT, LIFT, 0)
            scaled = q[part] * ks[part].to(K_DOT)[:, None]
            if lifted(part, K_BITS, K_WORD, LIFT):
                scaled *= 1.0 / gain(part, K_BITS, K_WORD, LIFT)
                z = tl.dot(tl.full([16, KP], -1024.0, K_DOT), scaled, z)
            s = tl.dot(c, scaled, s, input_precision=PRECISION)
            z = tl.dot(tl.broadcast_to(zeros[part].to(K_DOT)[None, :], [16, KP]), q[part], z, input_precision=PRECISION)
        s += tl.max(z, 0)[None, :]
    elif K_KIND == "rows":
        # Groups that eviction has made uneven: every token looks up its own row of scales.
        w = tl.arange(0, KP)
        if k_table is None:
            row = (n0 + rows) // K_GROUP
        else:
            row = tl.load(k_table + (n0 + rows) * kt_row, mask=ok, other=0)
        good = ok[:, None] & (w < W)[None, :]
        for part in tl.static_range(PARTS):
            at = row.to(tl.int64)[:, None] * ks_row + part_channel(part, D, K_BITS, K_WORD, K_CHUNK) + (w * K_WORD)[None, :]
            scale = tl.load(k_scale + at, mask=good, other=0.0).to(tl.float32)
            zero = tl.load(k_zero + at, mask=good, other=0.0).to(tl.float32)
            c = _field(words[part // FIELDS], part, K_BITS, K_WORD, CODES, False, tl.float32, False, 0)
            s = tl.dot((c * scale + zero).to(K_DOT), q[part], s, input_precision=PRECISION)
    elif K_KIND == "token":
        for g in tl.static_range(D // K_GROUP):
            d = tl.zeros([BLOCK_N, M], tl.float32) - q_lift[g][None, :]
            for part in tl.static_range(PARTS):
                if part_channel(part, D, K_BITS, K_WORD, K_CHUNK) // K_GROUP == g:
                    c = _field(words[part // FIELDS], part, K_BITS, K_WORD, CODES, FAST, K_DOT, LIFT, 0)
                    d = tl.dot(c, q[part] * (1.0 / gain(part, K_BITS, K_WORD, LIFT)), d, input_precision=PRECISION)
            s += d * ks[g].to(tl.float32)[:, None] + kz[g].to(tl.float32)[:, None] * q_sum[g][None, :]
    else:
        s = tl.dot(_field(words[0], 0, K_BITS, K_WORD, CODES, FAST, K_DOT, LIFT, 0), q[0], s, input_precision=PRECISION)
    return s


@triton.jit
def _tile(
    n0,
    hi,
    rows,
    k,
    v,
    k_scale,
    k_zero,
    k_table,
    ks_row,
    kt_row,
    bias,
    bias_n,
    cap,
    q,
    q_sum,
    q_lift,
    unit,
    m,
    l,
    acc,
    z,
    e,
    ks,
    kz,
    vs,
    vz,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_KIND: tl.constexpr,
    K_BITS: tl.constexpr,
    K_WORD: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_ROW: tl.constexpr,
    KP: tl.constexpr,
    K_DOT: tl.constexpr,
    K_FAST: tl.constexpr,
    K_PAIRS: tl.constexpr,
    V_KIND: tl.constexpr,
    V_BITS: tl.constexpr,
    V_WORD: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_ROW: tl.constexpr,
    VP: tl.constexpr,
    V_DOT: tl.constexpr,
    V_FAST: tl.constexpr,
):
    """One step of the online softmax: the tile of keys and values that starts at token ``n0``."""
    ok = n0 + rows < hi
    s = _scores(
        n0,
        rows,
        ok,
        k,
        k_scale,
        k_zero,
        k_table,
        ks_row,
        kt_row,
        q,
        q_sum,
        q_lift,
        ks,
        kz,
        D,
        M,
        BLOCK_N,
        K_KIND,
        K_BITS,
        K_WORD,
        K_CHUNK,
        K_GROUP,
        K_ROW,
        KP,
        K_DOT,
        K_FAST,
        K_PAIRS,
    )
    s = s * unit[None, :]
    if SOFTCAP:
        t = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / cap))
        s = tl.where(s < 0, -LOG2E, LOG2E) * cap * ((1.0 - t) / (1.0 + t))
    if bias is not None:
        at = bias + (n0 + rows).to(tl.int64)[:, None] * bias_n
        s += tl.load(at, mask=ok[:, None], other=0.0).to(tl.float32) * LOG2E
    s = tl.where(ok[:, None], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 0))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a block in which nothing may be seen: exp2(-inf), not exp2(nan)
    p = tl.exp2(s - m_safe[None, :])
    alpha = tl.exp2(m - m_safe)
    l = l * alpha + tl.sum(p, 0)

    W: tl.constexpr = V_CHUNK // V_WORD
    FIELDS: tl.constexpr = 8 * V_WORD // V_BITS
    PARTS: tl.constexpr = part_count(D, V_BITS, V_WORD, V_CHUNK)
    CODES: tl.constexpr = V_KIND != "dense"
    MIDDLE: tl.constexpr = 2 ** (V_BITS - 1)
    shrink = alpha
    weights = ()
    if CODES:
        new_z = ()
        inverse = 1.0
        if V_DOT == tl.float16:
            # Probability x scale must stay inside float16: it is divided by the power of two above the largest scale seen so far.
            top = vs[0]
            for g in tl.static_range(1, D // V_GROUP):
                top = tl.maximum(top, vs[g])
            e_new = tl.maximum(e, tl.max(top, 0).to(tl.float32).to(tl.int32, bitcast=True) >> 23)
            inverse = ((254 - e_new) << 23).to(tl.float32, bitcast=True)
            shrink = alpha * tl.exp2((e - e_new).to(tl.float32))
            e = e_new
        for g in tl.static_range(D // V_GROUP):
            # Codes are taken from the middle of their range, whose value is in z: so their sums stay small and keep their digits.
            scale = vs[g].to(tl.float32)
            middle = vz[g].to(tl.float32) + scale * MIDDLE
            new_z = new_z + (z[g] * alpha + tl.sum(p * middle[:, None], 0),)
            weights = weights + ((p * (scale * inverse)[:, None]).to(V_DOT),)
        z = new_z
    else:
        weights = weights + (p.to(V_DOT),)
    words = ()
    for c in tl.static_range(PARTS // FIELDS):
        words = words + (_words(v, rows, n0, ok, c * W, V_ROW, W, VP, True),)
    new_acc = ()
    for part in tl.static_range(PARTS):
        c = _field(words[part // FIELDS], part, V_BITS, V_WORD, CODES, V_FAST, V_DOT, False, MIDDLE)
        new_acc = new_acc + (
            tl.dot(
                c,
                weights[part_channel(part, D, V_BITS, V_WORD, V_CHUNK) // V_GROUP],
                acc[part] * shrink[None, :],
                input_precision=PRECISION,
            ),
        )
    return m_new, l, new_acc, z, e


@triton.jit
def _attend(
    lo,
    hi,
    k,
    v,
    k_scale,
    k_zero,
    k_table,
    v_scale,
    v_zero,
    ks_row,
    kt_row,
    vs_row,
    bias,
    bias_n,
    cap,
    scaling,
    q_base,
    q_d,
    live,
    out,
    lse,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    K_KIND: tl.constexpr,
    K_BITS: tl.constexpr,
    K_WORD: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_ROW: tl.constexpr,
    K_DOT: tl.constexpr,
    K_FAST: tl.constexpr,
    K_PAIRS: tl.constexpr,
    V_KIND: tl.constexpr,
    V_BITS: tl.constexpr,
    V_WORD: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_ROW: tl.constexpr,
    V_DOT: tl.constexpr,
    V_FAST: tl.constexpr,
):
    """Attention over the tokens ``lo .. hi``, normalised, with its log2-sum-exp, written to ``out`` [M] rows and ``lse`` [M]."""
    KP: tl.constexpr = max(16, triton.next_power_of_2(K_CHUNK // K_WORD))
    VP: tl.constexpr = max(16, triton.next_power_of_2(V_CHUNK // V_WORD))
    K_PARTS: tl.constexpr = part_count(D, K_BITS, K_WORD, K_CHUNK)
    V_PARTS: tl.constexpr = part_count(D, V_BITS, V_WORD, V_CHUNK)
    rows = tl.arange(0, BLOCK_N)
    w = tl.arange(0, KP)

    # The query, one tensor a part. Against codes in float16 it is first divided by a power of two (exact), so that no product overflows.
    top = tl.zeros([M], tl.float32)
    q32 = ()
    for part in tl.static_range(K_PARTS):
        at = q_base[None, :] + ((part_channel(part, D, K_BITS, K_WORD, K_CHUNK) + w * K_WORD) * q_d)[:, None]
        x = tl.load(at, mask=live[None, :] & (w < K_CHUNK // K_WORD)[:, None], other=0.0).to(tl.float32)
        q32 = q32 + (x,)
        top = tl.maximum(top, tl.max(tl.abs(x), 0))
    unit = tl.zeros([M], tl.float32) + scaling
    inverse = tl.full([M], 1.0, tl.float32)
    if K_KIND != "dense" and K_DOT == tl.float16:
        exponent = top.to(tl.int32, bitcast=True) >> 23
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        unit = unit * (exponent << 23).to(tl.float32, bitcast=True)
    if not SOFTCAP:
        unit = unit * LOG2E
    q = ()
    q_sum = ()
    q_lift = ()
    for part in tl.static_range(K_PARTS):
        q = q + ((q32[part] * inverse[None, :]).to(K_DOT),)
    if K_KIND == "token":
        for g in tl.static_range(D // K_GROUP):
            total = tl.zeros([M], tl.float32)
            lift = tl.zeros([M], tl.float32)
            for part in tl.static_range(K_PARTS):
                if part_channel(part, D, K_BITS, K_WORD, K_CHUNK) // K_GROUP == g:
                    part_sum = tl.sum(q[part].to(tl.float32), 0)
                    total += part_sum
                    if lifted(part, K_BITS, K_WORD, K_DOT == tl.float16):
                        lift += part_sum * (1024.0 / gain(part, K_BITS, K_WORD, True))
            q_sum = q_sum + (total,)
            q_lift = q_lift + (lift,)

    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)
    acc = ()
    for _ in tl.static_range(V_PARTS):
        acc = acc + (tl.zeros([VP, M], tl.float32),)
    z = ()
    if V_KIND != "dense":
        for _ in tl.static_range(D // V_GROUP):
            z = z + (tl.zeros([M], tl.float32),)
    e = 0

    ks, kz, vs, vz = _fetch(
        lo,
        hi,
        rows,
        k_scale,
        k_zero,
        v_scale,
        v_zero,
        ks_row,
        vs_row,
        D,
        K_KIND,
        K_BITS,
        K_WORD,
        K_CHUNK,
        K_GROUP,
        KP,
        V_KIND,
        V_GROUP,
    )
    for n0 in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        ks1, kz1, vs1, vz1 = _fetch(
            n0 + BLOCK_N,
            hi,
            rows,
            k_scale,
            k_zero,
            v_scale,
            v_zero,
            ks_row,
            vs_row,
            D,
            K_KIND,
            K_BITS,
            K_WORD,
            K_CHUNK,
            K_GROUP,
            KP,
            V_KIND,
            V_GROUP,
        )
        m, l, acc, z, e = _tile(
            n0,
            hi,
            rows,
            k,
            v,
            k_scale,
            k_zero,
            k_table,
            ks_row,
            kt_row,
            bias,
            bias_n,
            cap,
            q,
            q_sum,
            q_lift,
            unit,
            m,
            l,
            acc,
            z,
            e,
            ks,
            kz,
            vs,
            vz,
            D,
            M,
            BLOCK_N,
            SOFTCAP,
            K_KIND,
            K_BITS,
            K_WORD,
            K_CHUNK,
            K_GROUP,
            K_ROW,
            KP,
            K_DOT,
            K_FAST,
            K_PAIRS,
            V_KIND,
            V_BITS,
            V_WORD,
            V_CHUNK,
            V_GROUP,
            V_ROW,
            VP,
            V_DOT,
            V_FAST,
        )
        ks, kz, vs, vz = ks1, kz1, vs1, vz1

    r = tl.where(l > 0, 1.0, 0.0) / tl.where(l > 0, l, 1.0)
    if V_KIND != "dense" and V_DOT == tl.float16:
        unit_v = (e << 23).to(tl.float32, bitcast=True)
    else:
        unit_v = 1.0
    w = tl.arange(0, VP)
    for part in tl.static_range(V_PARTS):
        x = acc[part]
        if V_KIND != "dense":
            x *= unit_v
            x += z[part_channel(part, D, V_BITS, V_WORD, V_CHUNK) // V_GROUP][None, :]
        at = out[None, :] + (part_channel(part, D, V_BITS, V_WORD, V_CHUNK) + w * V_WORD)[:, None]
        tl.store(at, x * r[None, :], mask=live[None, :] & (w < V_CHUNK // V_WORD)[:, None])
    tl.store(lse, tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), float("-inf")), mask=live)


@triton.jit
def decode_split(
    q,
    k,
    k_scale,
    k_zero,
    k_table,
    v,
    v_scale,
    v_zero,
    tail_k,
    tail_v,
    bias,
    length,
    part_out,
    part_lse,
    scaling,
    cap,
    n,
    tail_n,
    split_n,
    splits,
    parts,
    kv_heads,
    rows_m,
    q_b,
    q_h,
    q_n,
    q_d,
    k_b,
    k_h,
    v_b,
    v_h,
    ks_b,
    ks_h,
    ks_row,
    kt_b,
    kt_h,
    kt_row,
    vs_b,
    vs_h,
    vs_row,
    tk_b,
    tk_h,
    tv_b,
    tv_h,
    bias_b,
    bias_h,
    bias_q,
    bias_n,
    bias_tail,
    D: tl.constexpr,
    Q: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TAIL: tl.constexpr,
    K_KIND: tl.constexpr,
    K_BITS: tl.constexpr,
    K_WORD: tl.constexpr,
    K_CHUNK: tl.constexpr,
    K_GROUP: tl.constexpr,
    K_ROW: tl.constexpr,
    K_ALIGN: tl.constexpr,
    K_DOT: tl.constexpr,
    K_FAST: tl.constexpr,
    K_PAIRS: tl.constexpr,
    V_KIND: tl.constexpr,
    V_BITS: tl.constexpr,
    V_WORD: tl.constexpr,
    V_CHUNK: tl.constexpr,
    V_GROUP: tl.constexpr,
    V_ROW: tl.constexpr,
    V_ALIGN: tl.constexpr,
    V_DOT: tl.constexpr,
    V_FAST: tl.constexpr,
    TK_ROW: tl.constexpr,
    TK_ALIGN: tl.constexpr,
    TK_DOT: tl.constexpr,
    TV_ROW: tl.constexpr,
    TV_ALIGN: tl.constexpr,
    TV_DOT: tl.constexpr,
):
    """Partial attention of one KV head over one split of its tokens; the last split of all is the dense tail.

    Strides of k, v and the tail come divided by their ALIGN (in elements), so that the compiler knows how far they are aligned.
    """
    blocks = tl.cdiv(rows_m, M)
    bh = tl.program_id(0) // blocks
    split = tl.program_id(1)
    b = (bh // kv_heads).to(tl.int64)
    h = (bh % kv_heads).to(tl.int64)
    i = tl.program_id(0) % blocks * M + tl.arange(0, M)
    live = i < rows_m
    head = h * (rows_m // Q) + i // Q
    q_base = q + b * q_b + head * q_h + (i % Q) * q_n
    at = ((b * kv_heads + h) * rows_m + i) * parts + split
    out = part_out + at * D
    lse = part_lse + at
    tail_bias = bias
    if bias is not None:
        bias = bias + b * bias_b + h * bias_h + ((i % Q) * bias_q)[None, :]
        tail_bias = bias + (bias_tail + tl.zeros([], tl.int64)) * bias_n
    if split < splits:
        end = n
        if length is not None:
            end = tl.minimum(n, tl.load(length + b).to(tl.int32))
        lo = split * split_n
        hi = tl.maximum(tl.minimum(lo + split_n, end), lo)
        if k_scale is not None:
            k_scale = k_scale + b * ks_b + h * ks_h
            k_zero = k_zero + b * ks_b + h * ks_h
        if k_table is not None:
            k_table = k_table + b * kt_b + h * kt_h
        if v_scale is not None:
            v_scale = v_scale + b * vs_b + h * vs_h
            v_zero = v_zero + b * vs_b + h * vs_h
        _attend(
            lo,
            hi,
            k + (b * k_b + h * k_h) * K_ALIGN,
            v + (b * v_b + h * v_h) * V_ALIGN,
            k_scale,
            k_zero,
            k_table,
            v_scale,
            v_zero,
            ks_row,
            kt_row,
            vs_row,
            bias,
            bias_n,
            cap,
            scaling,
            q_base,
            q_d,
            live,
            out,
            lse,
            D,
            M,
            BLOCK_N,
            STAGES,
            SOFTCAP,
            K_KIND,
            K_BITS,
            K_WORD,
            K_CHUNK,
            K_GROUP,
            K_ROW,
            K_DOT,
            K_FAST,
            K_PAIRS,
            V_KIND,
            V_BITS,
            V_WORD,
            V_CHUNK,
            V_GROUP,
            V_ROW,
            V_DOT,
            V_FAST,
        )
    elif TAIL:
        _attend(
            0,
            tail_n,
            tail_k + (b * tk_b + h * tk_h) * TK_ALIGN,
            tail_v + (b * tv_b + h * tv_h) * TV_ALIGN,
            None,
            None,
            None,
            None,
            None,
            0,
            0,
            0,
            tail_bias,
            bias_n,
            cap,
            scaling,
            q_base,
            q_d,
            live,
            out,
            lse,
            D,
            M,
            BLOCK_N,
            1,
            SOFTCAP,
            "dense",
            8,
            1,
            D,
            D,
            TK_ROW,
            TK_DOT,
            False,
            False,
            "dense",
            8,
            1,
            D,
            D,
            TV_ROW,
            TV_DOT,
            False,
        )


@triton.jit
def decode_merge(
    part_out, part_lse, sinks, out, lse, parts, heads, queries, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr
):
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
