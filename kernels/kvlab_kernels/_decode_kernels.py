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

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# float32 products as three TF32 ones: float32 accuracy (2**-21) on tensor cores, and a fraction of the registers of plain float32.
PRECISION = tl.constexpr("tf32x3")


@triton.constexpr_function
def channel(x, part):
    """The first channel of a part; the next ones follow at steps of ``x.word``. See :mod:`kvlab_kernels.layout`."""
    chunk, field = divmod(part, x.fields)
    return field * x.bits % 8 // x.bits * x.plane + chunk * x.chunk + field * x.bits // 8


@triton.constexpr_function
def group_of(x, part):
    """The scale group that holds a part, where groups lie along the head dim."""
    return channel(x, part) // x.group


@triton.constexpr_function
def lifted(part, bits, lift):
    """Whether a part of the keys is multiplied as it is unpacked, ``1024 + c * 2**low``, and the 1024 is taken off the score.

    Only where 1024 is at most four times the range of the codes: more would cost precision. Not for values: over thousands
    of tokens the 1024 would drown in the rounding of the sum what the codes have to say.
    """
    return lift and 1024 >> part * bits % 8 <= 4 << bits


@triton.constexpr_function
def gain(part, bits, lift):
    """What a part's codes are multiplied by: ``2**low``, the place of their lowest bit in its byte, or 1 if they are not lifted."""
    return 2.0 ** (part * bits % 8) if lifted(part, bits, lift) else 1.0


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
    if lifted(part, bits, lift):
        body += " mov.b32 $0, t;"
    elif low == 0:
        body += f" mov.b32 u, {offset:#x}; add.rn.f16x2 $0, t, u;"
    else:
        body += f" mov.b32 u, {scale:#x}; mov.b32 w, {offset:#x}; fma.rn.f16x2 $0, t, u, w;"
    return "{ .reg .b32 t, u, w; " + body + " }"


@triton.constexpr_function
def float8_asm(lane, format):
    """PTX: byte ``lane`` of two 16-bit words, an 8-bit float each -> two float16.

    Its bits are put where float16 has them; e4m3's exponent is then short by 8, which a product makes up for, exactly.
    """
    body = "mov.b32 t, $1; " if lane else "shl.b32 t, $1, 8; "
    if format == "e5m2":
        return "{ .reg .b32 t; " + body + "and.b32 $0, t, 0xFF00FF00; }"
    body += "shr.b32 u, t, 1; and.b32 u, u, 0x3F803F80; lop3.b32 u, t, 0x80008000, u, 0xEA; mov.b32 w, 0x5C005C00; mul.rn.f16x2 $0, u, w;"
    return "{ .reg .b32 t, u, w; " + body + " }"


@triton.jit
def _float8(words, LANE: tl.constexpr, FORMAT: tl.constexpr, FAST: tl.constexpr):
    """8-bit floats in byte LANE of each word, as float16."""
    if FAST:
        asm: tl.constexpr = float8_asm(LANE, FORMAT)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        x = words.to(tl.int32) >> LANE * 8
        if FORMAT == "e5m2":
            return ((x & 255) << 8).to(tl.int16).to(tl.float16, bitcast=True)
        else:
            return (((x & 128) << 8) | ((x & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _field(
    words, X: tl.constexpr, PART: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, LIFT: tl.constexpr, MIDDLE: tl.constexpr, levels, third,
):  # fmt: skip
    """The values of one part of a tile, exact in DOT: codes as integers (lifted, or less MIDDLE), their levels, dense elements as they are.

    ``third``: for codes of three bits, where their third bits are: words, and how far a byte's first field is shifted in them.
    """
    if X.kind == "dense":
        return words.to(DOT)
    elif X.format == "e4m3" or X.format == "e5m2":
        return _float8(words, PART % X.fields, X.format, FAST).to(DOT)
    elif FAST:
        asm: tl.constexpr = unpack_asm(PART, X.bits, LIFT, MIDDLE)
        return tl.inline_asm_elementwise(asm, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    else:
        c = (words.to(tl.int32) >> PART % X.fields * X.bits) & (2**X.bits - 1)
        if X.third:
            shift: tl.constexpr = (
                PART % X.fields // 4 * 8 + PART % X.fields % 4 * 2
            )  # the byte's place in its word, then two bits a field
            c |= ((third[0].to(tl.int32) >> third[1] + shift) & 1) << 2
        if X.format == "normal":
            return tl.load(levels + c).to(DOT)
        c = c.to(tl.float32)
        if lifted(PART, X.bits, LIFT):
            c = c * gain(PART, X.bits, LIFT) + 1024.0
        return (c - MIDDLE).to(DOT)


@triton.jit
def _page(pages, n0, rows, hi, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of the tile at ``n0``, or of each of its rows where a tile is more than a page; nothing where tokens lie one behind the other."""
    if PAGE == 0:
        return ()
    elif PAGE % BLOCK_N == 0:
        return (tl.load(pages + n0 // PAGE, mask=n0 < hi, other=0).to(tl.int64),)
    else:
        return (tl.load(pages + (n0 + rows) // PAGE, mask=n0 + rows < hi, other=0).to(tl.int64),)


@triton.jit
def _offsets(n0, rows, page, ROW: tl.constexpr, PAGE_ROW: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a tile begins and where its rows are from there. The start is 64-bit, the way inside 32-bit: caches of more than 2**31 elements are real."""
    if PAGE == 0:
        return (n0 + tl.zeros([], tl.int64)) * ROW, rows * ROW
    elif PAGE % BLOCK_N == 0:
        return page[0] * PAGE_ROW + n0 % PAGE * ROW, rows * ROW
    else:
        return tl.zeros([], tl.int64), page[0] * PAGE_ROW + (n0 + rows) % PAGE * ROW


@triton.jit
def _words(base, n0, rows, ok, page, X: tl.constexpr, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr):
    """One chunk of a tile: [BLOCK_N, X.padded], or [X.padded, BLOCK_N] if TRANSPOSED."""
    w = tl.arange(0, X.padded)
    start, inner = _offsets(n0, rows, page, X.row, X.page_row, X.page, BLOCK_N)
    tile = base + start + CHUNK * X.width
    if TRANSPOSED:
        at = tile + inner[None, :] + w[:, None]
        inside = (w < X.width)[:, None]
        good = ok[None, :]
    else:
        at = tile + inner[:, None] + w[None, :]
        inside = (w < X.width)[None, :]
        good = ok[:, None]
    if X.width < X.padded:
        good = good & inside
    return tl.load(at, mask=good, other=0)


@triton.jit
def _thirds(base, n0, rows, ok, page, X: tl.constexpr, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The third bits of one chunk, shaped as its words, and the shift of the first field's; nothing for other widths.

    They follow the planes of two bits, in planes of eight fields: those of channel c lie in byte c % (D / 8), at bit c // (D / 8).
    """
    if not X.third:
        return ()
    half: tl.constexpr = X.plane // 2 // X.word
    w = CHUNK * X.width + tl.arange(0, X.padded)
    start, inner = _offsets(n0, rows, page, X.row, X.page_row, X.page, BLOCK_N)
    at = base + start + X.plane // X.word
    shift = tl.where(w < half, 0, 1)
    inside = tl.arange(0, X.padded) < X.width
    if TRANSPOSED:
        return tl.load(at + inner[None, :] + (w % half)[:, None], mask=ok[None, :] & inside[:, None], other=0), shift[:, None]
    else:
        return tl.load(at + inner[:, None] + (w % half)[None, :], mask=ok[:, None] & inside[None, :], other=0), shift[None, :]


@triton.jit
def _per_token(base, n0, rows, ok, page, X: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr):
    """Column G of the scales or zeros of a tile's tokens, [BLOCK_N]."""
    if X.page == 0:
        return tl.load(base + (n0 + rows).to(tl.int64) * X.scale_row + G, mask=ok, other=0.0)
    else:
        start, inner = _offsets(n0, rows, page, X.scale_row, X.scale_page, X.page, BLOCK_N)
        return tl.load(base + start + inner + G, mask=ok, other=0.0)


@triton.jit
def _group_start(n0, page, K: tl.constexpr):
    """Where the scales of the channel group of the tile at ``n0`` are; a tile lies within a group, and a group within a page."""
    if K.page == 0:
        return (n0 // K.group + tl.zeros([], tl.int64)) * K.scale_row
    else:
        return page[0] * K.scale_page + n0 % K.page // K.group * K.scale_row


@triton.jit
def _fetch(
    n0,
    hi,
    rows,
    page,
    k_scale,
    k_zero,
    v_scale,
    v_zero,
    K: tl.constexpr,
    V: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The scales and zeros of the tile at ``n0``, asked for one tile ahead of their use."""
    K_PARTS: tl.constexpr = K.parts
    K_GROUPS: tl.constexpr = K.groups
    V_GROUPS: tl.constexpr = V.groups
    ks = ()
    kz = ()
    vs = ()
    vz = ()
    ok = (rows * 0 + n0 if WHOLE else rows + n0) < hi
    if K.kind == "channel":
        w = tl.arange(0, K.padded)
        row = k_scale + _group_start(n0, page, K)
        for part in tl.static_range(K_PARTS):
            ks = ks + (tl.load(row + channel(K, part) + w * K.word, mask=(w < K.width) & (n0 < hi), other=0.0),)
    if K.kind == "token":
        for g in tl.static_range(K_GROUPS):
            ks = ks + (_per_token(k_scale, n0, rows, ok, page, K, g, BLOCK_N),)
            if K.zeros:
                kz = kz + (_per_token(k_zero, n0, rows, ok, page, K, g, BLOCK_N),)
    if V.kind == "token":
        for g in tl.static_range(V_GROUPS):
            vs = vs + (_per_token(v_scale, n0, rows, ok, page, V, g, BLOCK_N),)
            if V.zeros:
                vz = vz + (_per_token(v_zero, n0, rows, ok, page, V, g, BLOCK_N),)
    return ks, kz, vs, vz


@triton.jit
def _group_zeros(k_zero, start, K: tl.constexpr):
    """The zeros of one channel group, a tensor a part. As pairs of float16, which are 32 bits and so come by asynchronous copies."""
    K_PLANES: tl.constexpr = K.fields // 2
    K_PARTS: tl.constexpr = K.parts
    w = tl.arange(0, K.padded)
    inside = w < K.width
    base = k_zero + start
    found = ()
    if K.pairs:
        pairs = ()
        for plane in tl.static_range(K_PLANES):
            pairs = pairs + (tl.load(base.to(tl.pointer_type(tl.int32)) + plane * K.plane // 2 + w, mask=inside, other=0),)
        for part in tl.static_range(K_PARTS):
            half = pairs[part * K.bits % 8 // K.bits] >> part * K.bits // 8 * 16
            found = found + (half.to(tl.int16).to(tl.float16, bitcast=True),)
    else:
        for part in tl.static_range(K_PARTS):
            found = found + (tl.load(base + channel(K, part) + w * K.word, mask=inside, other=0.0),)
    return found


@triton.constexpr_function
def less(x):
    """What keys' codes are taken from: the middle of their range where they have no zero points."""
    return 0 if x.zeros else x.middle


@triton.constexpr_function
def partner(x, part):
    """The part that is turned together with this one (RoPE's pairs are ``x.turn`` channels apart); itself if it is not turned; -1 for the second of a pair."""
    c = channel(x, part)
    if c >= 2 * x.turn:
        return part
    return -1 if c >= x.turn else [channel(x, other) for other in range(x.parts)].index(c + x.turn)


@triton.jit
def _key(n0, rows, ok, page, words, thirds, k_scale, k_zero, k_table, table_n, k_levels, ks, kz, zeros, K: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """One part of a tile's keys, rebuilt: float32 [BLOCK_N, W]."""
    third = thirds[PART // K.fields] if K.third else ()
    c = _field(words[PART // K.fields], K, PART, K.fast, K.dot, False, less(K), k_levels, third).to(tl.float32)
    if K.kind == "channel":
        c = c * ks[PART].to(tl.float32)[None, :]
        if K.zeros:
            c += zeros[PART].to(tl.float32)[None, :]
    elif K.kind == "token":
        c = c * ks[group_of(K, PART)].to(tl.float32)[:, None]
        if K.zeros:
            c += kz[group_of(K, PART)].to(tl.float32)[:, None]
    elif K.kind == "rows":
        # Groups that eviction has made uneven, or that no tile fits: every token looks up its own row of scales.
        w = tl.arange(0, K.padded)
        start = tl.zeros([], tl.int64)
        if K.page:
            start += page[0] * K.scale_page
            row = (n0 + rows) % K.page // K.group
        elif k_table is None:
            row = (n0 + rows) // K.group
        else:
            row = tl.load(k_table + (n0 + rows).to(tl.int64) * table_n, mask=ok, other=0)
        at = (start + row.to(tl.int64) * K.scale_row)[:, None] + (channel(K, PART) + w * K.word)[None, :]
        good = ok[:, None] & (w < K.width)[None, :]
        c = c * tl.load(k_scale + at, mask=good, other=0.0).to(tl.float32)
        if K.zeros:
            c += tl.load(k_zero + at, mask=good, other=0.0).to(tl.float32)
    return c


@triton.jit
def _scores(
    n0, rows, ok, page, k, k_scale, k_zero, k_table, table_n, k_levels, waves, places, place_n, place_first, q, q_sum, q_lift, ks, kz,
    K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``K @ q`` for one tile, [BLOCK_N, M] float32, scales and zeros included."""
    K_CHUNKS: tl.constexpr = K.parts // K.fields
    KP: tl.constexpr = K.padded
    K_PARTS: tl.constexpr = K.parts
    K_GROUPS: tl.constexpr = K.groups
    words = ()
    thirds = ()
    for c in tl.static_range(K_CHUNKS):
        words = words + (_words(k, n0, rows, ok, page, K, c, False, BLOCK_N),)
        thirds = thirds + (_thirds(k, n0, rows, ok, page, K, c, False, BLOCK_N),)
    zeros = ()
    if K.kind == "channel" and K.zeros:
        zeros = _group_zeros(k_zero, _group_start(n0, page, K), K)
    s = tl.zeros([BLOCK_N, M], tl.float32)
    if K.turn:
        # Keys lie as they were before RoPE: rebuilt, each pair of channels is turned by its token's place.
        w = tl.arange(0, K.padded)
        place = rows + n0 + place_first
        if places is not None:
            place = tl.load(places + (n0 + rows).to(tl.int64) * place_n, mask=ok, other=0)
        wave = waves + place.to(tl.int64)[:, None] * K.waves
        good = ok[:, None] & (w < K.width)[None, :]
        for part in tl.static_range(K_PARTS):
            if partner(K, part) != -1:
                one = _key(
                    n0,
                    rows,
                    ok,
                    page,
                    words,
                    thirds,
                    k_scale,
                    k_zero,
                    k_table,
                    table_n,
                    k_levels,
                    ks,
                    kz,
                    zeros,
                    K,
                    part,
                    BLOCK_N,
                )
                if partner(K, part) == part:
                    s = tl.dot(one.to(K.dot), q[part], s, input_precision=PRECISION)
                else:
                    two = _key(
                        n0,
                        rows,
                        ok,
                        page,
                        words,
                        thirds,
                        k_scale,
                        k_zero,
                        k_table,
                        table_n,
                        k_levels,
                        ks,
                        kz,
                        zeros,
                        K,
                        partner(K, part),
                        BLOCK_N,
                    )
                    at = wave + (channel(K, part) + w * K.word)[None, :]
                    cos = tl.load(at, mask=good, other=0.0).to(tl.float32)
                    sin = tl.load(at + K.turn, mask=good, other=0.0).to(tl.float32)
                    s = tl.dot((one * cos - two * sin).to(K.dot), q[part], s, input_precision=PRECISION)
                    s = tl.dot((two * cos + one * sin).to(K.dot), q[partner(K, part)], s, input_precision=PRECISION)
    elif K.kind == "rows":
        for part in tl.static_range(K_PARTS):
            x = _key(
                n0, rows, ok, page, words, thirds, k_scale, k_zero, k_table, table_n, k_levels, ks, kz, zeros, K, part, BLOCK_N
            )
            s = tl.dot(x.to(K.dot), q[part], s, input_precision=PRECISION)
    elif K.kind == "channel":
        # sum_d q_d (scale_d c_d + zero_d): the scale goes into the query, the zero is one more row of keys, the same for the whole group.
        z = tl.zeros([16, M], tl.float32)
        for part in tl.static_range(K_PARTS):
            third = thirds[part // K.fields] if K.third else ()
            c = _field(words[part // K.fields], K, part, K.fast, K.dot, K.lift, less(K), k_levels, third)
            scaled = q[part] * ks[part].to(K.dot)[:, None]
            if lifted(part, K.bits, K.lift):
                scaled *= 1.0 / gain(part, K.bits, K.lift)
                z = tl.dot(tl.full([16, KP], -1024.0, K.dot), scaled, z)
            s = tl.dot(c, scaled, s, input_precision=PRECISION)
            if K.zeros:
                z = tl.dot(tl.broadcast_to(zeros[part].to(K.dot)[None, :], [16, KP]), q[part], z, input_precision=PRECISION)
        if K.zeros:
            s += tl.max(z, 0)[None, :]
    elif K.kind == "token":
        for g in tl.static_range(K_GROUPS):
            d = tl.zeros([BLOCK_N, M], tl.float32) - q_lift[g][None, :]
            for part in tl.static_range(K_PARTS):
                if group_of(K, part) == g:
                    third = thirds[part // K.fields] if K.third else ()
                    c = _field(words[part // K.fields], K, part, K.fast, K.dot, K.lift, less(K), k_levels, third)
                    d = tl.dot(c, q[part] * (1.0 / gain(part, K.bits, K.lift)), d, input_precision=PRECISION)
            s += d * ks[g].to(tl.float32)[:, None]
            if K.zeros:
                s += kz[g].to(tl.float32)[:, None] * q_sum[g][None, :]
    else:
        s = tl.dot(words[0].to(K.dot), q[0], s, input_precision=PRECISION)
    return s


@triton.jit
def _values(n0, rows, ok, page, v, v_levels, p, alpha, acc, z, e, vs, vz, V: tl.constexpr, BLOCK_N: tl.constexpr):
    """Add one tile's ``V.T @ p`` to what came before, ``acc`` and ``z``, which first shrink by ``alpha``."""
    V_GROUPS: tl.constexpr = V.groups
    V_CHUNKS: tl.constexpr = V.parts // V.fields
    V_PARTS: tl.constexpr = V.parts
    weights = ()
    shrink = alpha
    if V.kind == "dense":
        weights = weights + (p.to(V.dot),)
    else:
        inverse = 1.0
        if V.half:
            # Probability x scale must stay inside float16: it is divided by the power of two above the largest scale seen so far.
            top = vs[0]
            for g in tl.static_range(1, V_GROUPS):
                top = tl.maximum(top, vs[g])
            e_new = tl.maximum(e, tl.max(top, 0).to(tl.float32).to(tl.int32, bitcast=True) >> 23)
            inverse = ((254 - e_new) << 23).to(tl.float32, bitcast=True)
            shrink = alpha * tl.exp2((e - e_new).to(tl.float32))
            e = e_new
        new_z = ()
        for g in tl.static_range(V_GROUPS):
            # Codes are taken from the middle of their range, whose value is in z: so their sums stay small and keep their digits.
            scale = vs[g].to(tl.float32)
            if V.zeros:
                middle = vz[g].to(tl.float32) + scale * V.middle
                new_z = new_z + (z[g] * alpha + tl.sum(p * middle[:, None], 0),)
            weights = weights + ((p * (scale * inverse)[:, None]).to(V.dot),)
        z = new_z
    words = ()
    thirds = ()
    for c in tl.static_range(V_CHUNKS):
        words = words + (_words(v, n0, rows, ok, page, V, c, True, BLOCK_N),)
        thirds = thirds + (_thirds(v, n0, rows, ok, page, V, c, True, BLOCK_N),)
    new_acc = ()
    for part in tl.static_range(V_PARTS):
        third = thirds[part // V.fields] if V.third else ()
        c = _field(words[part // V.fields], V, part, V.fast, V.dot, False, V.middle, v_levels, third)
        new_acc = new_acc + (tl.dot(c, weights[group_of(V, part)], acc[part] * shrink[None, :], input_precision=PRECISION),)
    return new_acc, z, e


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

    page = _page(pages, lo, rows, hi, K.page, BLOCK_N)
    ks, kz, vs, vz = _fetch(lo, hi, rows, page, k_scale, k_zero, v_scale, v_zero, K, V, WHOLE, BLOCK_N)
    for n0 in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        page1 = _page(pages, n0 + BLOCK_N, rows, hi, K.page, BLOCK_N)
        ks1, kz1, vs1, vz1 = _fetch(n0 + BLOCK_N, hi, rows, page1, k_scale, k_zero, v_scale, v_zero, K, V, WHOLE, BLOCK_N)
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
    K: tl.constexpr, NONE: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr, WHOLE: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """What the queries give each of the tokens ``lo .. hi``, their log2-sum-exp ``total`` [M] being known: written to ``mass``, or with MORE added to it."""
    rows = tl.arange(0, BLOCK_N)
    q, q_sum, q_lift, unit = _query(q_base, live, scaling, K, M, SOFTCAP)
    for n0 in tl.range(lo, hi, BLOCK_N):
        page = _page(pages, n0, rows, hi, K.page, BLOCK_N)
        ks, kz, _, _ = _fetch(n0, hi, rows, page, k_scale, k_zero, None, None, K, NONE, WHOLE, BLOCK_N)
        ok = _counted(n0, rows, hi, first, WHOLE, BLOCK_N)
        s = _scores(n0, rows, ok, page, k, k_scale, k_zero, k_table, table_n, k_levels, waves, places, place_n, place_first, q, q_sum, q_lift, ks, kz,
                    K, M, BLOCK_N)  # fmt: skip
        s = _logits(s, n0, rows, ok, unit, bias, bias_n, cap, SOFTCAP)
        p = tl.where(live[None, :], tl.exp2(s - tl.where(total == float("-inf"), 0.0, total)[None, :]), 0.0)
        given = tl.sum(p, 1)
        at = mass + (n0 + rows).to(tl.int64)
        if MORE:
            given += tl.load(at, mask=n0 + rows < hi, other=0.0)
        tl.store(at, given, mask=n0 + rows < hi)


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

    MASS > 0: the second pass, in which every key is told what the queries from ``since`` on gave it. ``part_lse`` is then the log-sum-exp of the whole,
    ``part_out`` where the mass goes, and a program holds the queries of its head in MASS blocks, one after the other.
    """
    blocks = 1 if MASS else tl.cdiv(rows_m, M)
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
    for block in tl.static_range(max(MASS, 1)):
        i = (block if MASS else tl.program_id(0) % blocks) * M + tl.arange(0, M)
        live = i < rows_m
        q_base = q + b * q_b + (h * (rows_m // Q) + i // Q) * q_h + (i % Q) * q_n
        row = (b * kv_heads + h) * rows_m + i
        own_bias = None
        tail_bias = None
        if bias is not None:
            own_bias = bias + ((i % Q) * bias_q)[None, :]
            tail_bias = own_bias + (bias_tail + tl.zeros([], tl.int64)) * bias_n
        if MASS:
            total = tl.load(part_lse + row, mask=live, other=0.0) * LOG2E
            live = live & (i % Q >= since)
            mass = part_out + (b * kv_heads + h) * (bias_tail + tail_n)
            if split < splits:
                _weigh(lo, hi, first, pages, k, k_scale, k_zero, k_table, table_n, k_levels, waves, places, place_n, place_first, own_bias, bias_n, cap, scaling,
                       q_base, live, total, mass, K, V, M, BLOCK_N, SOFTCAP, WHOLE, block > 0)  # fmt: skip
            elif TK is not None:
                _weigh(0, tail_n, None, None, tail_k, None, None, None, 0, None, None, None, 0, 0, tail_bias, bias_n, cap, scaling, q_base, live, total,
                       mass + bias_tail, TK, V, M, BLOCK_N, SOFTCAP, False, block > 0)  # fmt: skip
        else:
            at = row * parts + split
            out = part_out + at * D
            lse = part_lse + at
            if split < splits:
                _attend(lo, hi, first, pages, k, v, k_scale, k_zero, k_table, table_n, k_levels, v_scale, v_zero, v_levels, waves, places, place_n,
                        place_first, own_bias, bias_n, cap, scaling, q_base, live, out, lse, K, V, M, BLOCK_N, STAGES, SOFTCAP, WHOLE)  # fmt: skip
            elif TK is not None:
                _attend(0, tail_n, None, None, tail_k, tail_v, None, None, None, 0, None, None, None, None, None, None, 0, 0,
                        tail_bias, bias_n, cap, scaling, q_base, live, out, lse, TK, TV, M, BLOCK_N, 1, SOFTCAP, False)  # fmt: skip


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
