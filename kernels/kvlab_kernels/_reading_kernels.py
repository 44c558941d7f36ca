"""How the decode kernels read a cache: words, fields, scales, pages; keys times queries, values times weights. See :mod:`kvlab_kernels._decode_kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

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
def _page(pages, n0, rows, hi, first, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of the tile at ``n0``, or of each of its rows where a tile is more than a page; nothing where tokens lie one behind the other."""
    if PAGE == 0:
        return ()
    elif PAGE % BLOCK_N == 0:
        return (tl.load(pages + n0 // PAGE, mask=n0 < hi, other=0).to(tl.int64),)
    else:
        good = n0 + rows < hi
        if first is not None:
            good = good & (n0 + rows >= first)
        return (tl.load(pages + (n0 + rows) // PAGE, mask=good, other=0).to(tl.int64),)


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
    n0, hi, first, rows, page, k_scale, k_zero, v_scale, v_zero,
    K: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The scales and zeros of the tile at ``n0``, asked for one tile ahead of their use."""
    K_PARTS: tl.constexpr = K.parts
    K_GROUPS: tl.constexpr = K.groups
    V_GROUPS: tl.constexpr = V.groups
    ks = ()
    kz = ()
    vs = ()
    vz = ()
    ok = (rows * 0 + n0 if WHOLE else rows + n0) < hi
    if first is not None:
        ok = ok & (rows + n0 >= first)
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
        # sum_d q_d (scale_d c_d + zero_d): the scale goes into the query, the zero is one more row of keys, the same for the whole group. Where both are
        # float32 they are first divided by a power of two (exact), so that keys of any size are multiplied in float16's range.
        small = 1.0
        large = 1.0
        if K.ranged:
            most = tl.max(tl.abs(ks[0].to(tl.float32)), 0)
            for part in tl.static_range(K_PARTS):
                most = tl.maximum(most, tl.max(tl.abs(ks[part].to(tl.float32)), 0))
                if K.zeros:
                    most = tl.maximum(
                        most, tl.max(tl.abs(zeros[part].to(tl.float32)), 0) * 0.0078125
                    )  # zeros are as large as 2**bits scales
            exponent = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 1), 253)
            small = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            large = (exponent << 23).to(tl.float32, bitcast=True)
        z = tl.zeros([16, M], tl.float32)
        for part in tl.static_range(K_PARTS):
            third = thirds[part // K.fields] if K.third else ()
            c = _field(words[part // K.fields], K, part, K.fast, K.dot, K.lift, less(K), k_levels, third)
            own = ks[part]
            if K.ranged:
                own = own.to(tl.float32) * small
            scaled = q[part] * own.to(K.dot)[:, None]
            if lifted(part, K.bits, K.lift):
                scaled *= 1.0 / gain(part, K.bits, K.lift)
                z = tl.dot(tl.full([16, KP], -1024.0, K.dot), scaled, z)
            s = tl.dot(c, scaled, s, input_precision=PRECISION)
            if K.zeros:
                zero = zeros[part]
                if K.ranged:
                    zero = zero.to(tl.float32) * small
                z = tl.dot(tl.broadcast_to(zero.to(K.dot)[None, :], [16, KP]), q[part], z, input_precision=PRECISION)
        if K.zeros:
            s += tl.max(z, 0)[None, :]
        if K.ranged:
            s *= large
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
