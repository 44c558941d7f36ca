"""What the kernels should say, in float64 and written without them: channel by channel, softmax in the open."""

import torch

from kvlab_kernels.layout import Codes, normal_levels

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def code(x, d):
    """The code of channel ``d`` of every token, taken from its bits one by one."""
    dim = x.codes.shape[3] * 8 // x.bits
    low = 2 if x.bits == 3 else x.bits
    width = dim * low // 8
    found = (x.codes[..., d % width].int() >> d // width * low) & 2**low - 1
    if x.bits == 3:  # the third bits follow, eight channels to a byte
        found = found | ((x.codes[..., width + d % (dim // 8)].int() >> d // (dim // 8)) & 1) << 2
    return found


def number(x, found):
    """What a code says before its scale."""
    if x.format in ("e4m3", "e5m2"):
        mantissa, bias = (3, 7) if x.format == "e4m3" else (2, 15)
        sign, exponent, rest = found >> 7, (found & 127) >> mantissa, (found & 2**mantissa - 1).double()
        size = torch.where(exponent == 0, rest * 2.0 ** (1 - bias), (rest + 2**mantissa) * 2.0 ** (exponent.double() - bias))
        return (1 - 2 * sign) * size * 2.0**-mantissa
    if x.format == "normal":
        return torch.tensor(normal_levels(x.bits), dtype=torch.float32).double()[found]
    return found.double() - (2 ** (x.bits - 1) if x.zero is None else 0)


def values(x):
    """Dense float64 values of a tensor or of Codes, one channel at a time."""
    if isinstance(x, torch.Tensor):
        return x.double()
    b, h, n, width = x.codes.shape
    dim = width * 8 // x.bits
    out = torch.empty(b, h, n, dim, dtype=torch.float64)
    token = torch.arange(n).expand(b, h, n)
    row = x.group.long() if x.group is not None else token // x.group_size
    zeros = torch.zeros_like(x.scale) if x.zero is None else x.zero
    for d in range(dim):
        if x.axis == "channel":
            scale, zero = (t[..., d].double().gather(2, row) for t in (x.scale, zeros))
        else:
            scale, zero = (t[..., d // x.group_size].double() for t in (x.scale, zeros))
        out[..., d] = number(x, code(x, d)) * scale + zero
    return out


def turned(k, places):
    """Keys after RoPE, token by token."""
    half = places.waves.shape[1] // 2
    b, h, n, _ = k.shape
    at = (
        torch.arange(places.start, places.start + n).expand(b, h, n) if places.columns is None else places.columns.expand(b, h, n)
    )
    cos, sin = places.waves.double()[at.long()].chunk(2, -1)
    one, two, rest = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


def unpaged(x, table):
    """Pages put one behind the other, for each row and head: Codes or a tensor ``[B, Hk, N, ..]``."""
    heads = (x if isinstance(x, torch.Tensor) else x.codes).shape[1]

    def rows(t):
        t = t.expand(-1, heads, -1, -1)
        found = [
            [torch.cat([t[p, h] for p in table[b, h if table.shape[1] > 1 else 0].tolist()]) for h in range(heads)]
            for b in range(len(table))
        ]
        return torch.stack([torch.stack(row) for row in found])

    if isinstance(x, torch.Tensor):
        return rows(x)
    return Codes(
        rows(x.codes), rows(x.scale), None if x.zero is None else rows(x.zero), x.bits, x.axis, x.group_size, None, x.format
    )


def attention(
    q, k, v, scaling, bias=None, softcap=None, sinks=None, length=None, start=None, residual_k=None, residual_v=None, places=None
):
    """-> out, lse in float64, head by head."""
    k, v = values(k), values(v)
    if places is not None:
        k = turned(k, places)
    batch, kv_heads, n, _ = k.shape
    seen = torch.ones(batch, kv_heads, n, dtype=torch.bool)
    for what, bound in (("length", length), ("start", start)):
        if bound is not None:
            bound = torch.as_tensor(bound)
            bound = (bound[:, None] if bound.ndim == 1 else bound).expand(batch, kv_heads)[..., None]
            seen &= torch.arange(n) < bound if what == "length" else torch.arange(n) >= bound
    if residual_k is not None:
        k, v = torch.cat([k, residual_k.double()], 2), torch.cat([v, residual_v.double()], 2)
        seen = torch.cat([seen, torch.ones(batch, kv_heads, residual_k.shape[2], dtype=torch.bool)], 2)
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for head in range(q.shape[1]):
            kv = head // (q.shape[1] // kv_heads)
            for i in range(q.shape[2]):
                s = k[b, kv] @ q[b, head, i].double() * scaling
                if softcap is not None:
                    s = softcap * torch.tanh(s / softcap)
                if bias is not None:
                    pick = [min(x, size - 1) for x, size in zip((b, kv, i), bias.shape)]
                    s = s + bias[pick[0], pick[1], pick[2]].double()
                s = s[seen[b, kv]]
                weights = s if sinks is None else torch.cat([s, sinks[head : head + 1].double()])
                if len(weights) and weights.max() > -torch.inf:
                    lse[b, head, i] = torch.logsumexp(weights, 0)
                    out[b, head, i] = (s - lse[b, head, i]).exp() @ v[b, kv][seen[b, kv]]
    return out, lse


def mass(q, k, v, scaling, since=0, **options):
    """What the queries from ``since`` on give each key, float64 ``[B, Hk, N + R]``: one key at a time, its value 1 and all others 0."""
    k, v = values(k), values(v)
    batch, kv_heads, n, _ = k.shape
    tail = options.get("residual_v")
    total = n + (0 if tail is None else tail.shape[2])
    found = torch.zeros(batch, kv_heads, total, dtype=torch.float64)
    group = q.shape[1] // kv_heads
    for at in range(total):
        own = torch.zeros(batch, kv_heads, total, v.shape[3])
        own[:, :, at] = 1
        rest = {} if tail is None else {"residual_v": own[:, :, n:]}
        out, _ = attention(q, k, own[:, :, :n], scaling, **{**options, **rest})
        found[:, :, at] = out[..., 0].view(batch, kv_heads, group, -1)[..., since:].sum((2, 3))
    return found


def random_codes(
    batch,
    heads,
    n,
    dim,
    bits,
    axis,
    group_size,
    *,
    table=False,
    capacity=None,
    scale_dtype=torch.float16,
    zeros=True,
    format="int",
):
    """Codes of every value with plausible scales; with ``capacity``, views of a longer cache whose other rows are poisoned."""
    capacity = capacity or n
    groups = -(-capacity // group_size) if axis == "channel" else capacity
    scale_shape = (batch, heads, groups, dim if axis == "channel" else dim // group_size)
    codes = torch.full((batch, heads, capacity, dim * bits // 8), 255, dtype=torch.uint8)
    codes[:, :, :n] = torch.randint(0, 256, (batch, heads, n, codes.shape[3]))
    if format == "e4m3":
        codes &= 0xBF  # numbers below 2, no NaN
    if format == "e5m2":
        codes &= 0xBB
    scale = (torch.rand(scale_shape) + 0.5).div(2 ** (bits - 1)).to(scale_dtype)
    zero = (torch.randn(scale_shape) * 0.5 - 1).to(scale_dtype)
    used = -(-n // group_size) if axis == "channel" else n
    scale[:, :, used:], zero[:, :, used:] = torch.nan, torch.nan
    group = None
    if table:
        group = torch.randint(0, used, (batch, heads, n), dtype=torch.int32).sort(-1).values.int()
    return Codes(codes[:, :, :n], scale[:, :, :used], zero[:, :, :used] if zeros else None, bits, axis, group_size, group, format)


def error(got, want):
    """Relative error in the Euclidean norm; NaN counts as infinite."""
    gap = (got.double() - want).norm() / want.norm().clamp_min(1e-30)
    return float("inf") if gap.isnan() else float(gap)


def check(got, want, dtype):
    """Outputs within the tolerance of the dtype, log-sum-exp too (absolutely), masked rows exactly zero and -inf."""
    (out, lse), (out64, lse64) = got, want
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.shape == out64.shape and lse.shape == lse64.shape
    assert error(out, out64) < TOLERANCE[dtype]
    blind = lse64 == -torch.inf
    assert torch.equal(lse == -torch.inf, blind) and not out[blind].any()
    gap = (lse.double() - lse64)[~blind].abs()
    assert not gap.numel() or gap.max() < 2 * TOLERANCE[dtype] * (1 + lse64[~blind].abs().max())
