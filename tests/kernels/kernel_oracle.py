"""What the kernels should say, in float64 and written without them: channel by channel, softmax in the open."""

import torch

from kvlab_kernels.layout import Codes

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def values(x):
    """Dense float64 values of a tensor or of Codes, one channel at a time."""
    if isinstance(x, torch.Tensor):
        return x.double()
    b, h, n, width = x.codes.shape
    dim = width * 8 // x.bits
    out = torch.empty(b, h, n, dim, dtype=torch.float64)
    token = torch.arange(n).expand(b, h, n)
    row = x.group.long() if x.group is not None else token // x.group_size
    for d in range(dim):
        code = (x.codes[..., d % width].int() >> d // width * x.bits) & 2**x.bits - 1
        if x.axis == "channel":
            scale, zero = (t[..., d].double().gather(2, row) for t in (x.scale, x.zero))
        else:
            scale, zero = (t[..., d // x.group_size].double() for t in (x.scale, x.zero))
        out[..., d] = code * scale + zero
    return out


def attention(q, k, v, scaling, bias=None, softcap=None, sinks=None, length=None, residual_k=None, residual_v=None):
    """-> out, lse in float64, head by head."""
    k, v = values(k), values(v)
    batch, kv_heads, n, _ = k.shape
    seen = torch.ones(batch, n, dtype=torch.bool)
    if length is not None:
        seen = torch.arange(n) < torch.as_tensor(length).expand(batch)[:, None]
    if residual_k is not None:
        k, v = torch.cat([k, residual_k.double()], 2), torch.cat([v, residual_v.double()], 2)
        seen = torch.cat([seen, torch.ones(batch, residual_k.shape[2], dtype=torch.bool)], 1)
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
                s = s[seen[b]]
                weights = s if sinks is None else torch.cat([s, sinks[head : head + 1].double()])
                if len(weights) and weights.max() > -torch.inf:
                    lse[b, head, i] = torch.logsumexp(weights, 0)
                    out[b, head, i] = (s - lse[b, head, i]).exp() @ v[b, kv][seen[b]]
    return out, lse


def random_codes(batch, heads, n, dim, bits, axis, group_size, *, table=False, capacity=None, scale_dtype=torch.float16):
    """Codes of every value with plausible scales; with ``capacity``, views of a longer cache whose other rows are poisoned."""
    capacity = capacity or n
    groups = -(-capacity // group_size) if axis == "channel" else capacity
    scale_shape = (batch, heads, groups, dim if axis == "channel" else dim // group_size)
    codes = torch.full((batch, heads, capacity, dim * bits // 8), 255, dtype=torch.uint8)
    codes[:, :, :n] = torch.randint(0, 256, (batch, heads, n, codes.shape[3]))
    scale = (torch.rand(scale_shape) + 0.5).div(2 ** (bits - 1)).to(scale_dtype)
    zero = (torch.randn(scale_shape) * 0.5 - 1).to(scale_dtype)
    used = -(-n // group_size) if axis == "channel" else n
    scale[:, :, used:], zero[:, :, used:] = torch.nan, torch.nan
    group = None
    if table:
        group = torch.randint(0, used, (batch, heads, n), dtype=torch.int32).sort(-1).values.int()
    return Codes(codes[:, :, :n], scale[:, :, :used], zero[:, :, :used], bits, axis, group_size, group)


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
