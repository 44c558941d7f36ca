"""Causal attention that also says how much of it each key got, without ever holding a queries x keys matrix.

What heavy hitters are chosen by (H2O, arXiv 2306.14048) is a column sum of attention's weights. Attention as it is computed in blocks knows a weight only
when the whole row is known, so there are two passes: the first is FlashAttention and keeps each row's log-sum-exp, the second goes over the
scores again, key by key, and adds up ``exp(score - log-sum-exp)``. Memory is O(queries + keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import launch
from .decode import DTYPES

#: bytes of a number, whether the head dim is above 128 -> queries and keys of a tile; more would spill
BLOCKS = {(2, False): (64, 64), (2, True): (64, 32), (4, False): (32, 32), (4, True): (16, 16)}
EVERYTHING = 1 << 30  # a window that hides nothing
PIECE = 1 << 22  # scores that the torch way holds at a time


def scored_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    first: Tensor | None = None,
    since: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``softmax(scaling * q @ k.T) @ v``, causal, and what each key got: ``(out, lse, mass)``.

    ``q``: ``[B, Hq, Q, D]``, float32, float16 or bfloat16; ``k``, ``v``: ``[B, Hk, N, D]`` of the same dtype, ``Hq`` a multiple of ``Hk``, ``N`` at
    least ``Q``; the queries are the last ``Q`` tokens, and each sees itself and what came before. Only the last dim must be contiguous.
    ``softcap``: scores become ``softcap * tanh(score / softcap)``. ``sinks``: ``[Hq]``, logits that join the denominator only. ``window``: how many of
    the newest tokens a query sees, itself included. ``first``: int ``[B]``, the first token of each row that is no padding. ``since``: queries before this
    one are not counted in ``mass`` (SnapKV looks at the last ones only).

    ``out``: ``[B, Hq, Q, D]`` in q's dtype; ``lse``: float32 ``[B, Hq, Q]``; ``mass``: float32 ``[B, Hk, N]``, weights added up over the counted queries of
    all heads of a group, so all of ``mass`` is ``Hq / Hk * (Q - since)`` a KV head where no sink takes a part. A query that sees nothing gives 0 and -inf.
    The same result for the same arguments, always. Raises ValueError, naming what was given and what is allowed.
    """
    launch.require_triton()
    launch.check_device(q, k, v, sinks, first)
    work = plan(q, k, v, scaling, softcap, sinks, window, first, since, launch.interpreting())
    with launch.on(q.device):
        for kernel, grid, args in work.launches:
            kernel[grid](*args, **work.constants, **work.options)
    return work.out, work.lse, work.mass


@dataclass(frozen=True)
class Plan:
    """The two launches of one call: kernel, grid and arguments, in order."""

    out: Tensor
    lse: Tensor
    mass: Tensor
    launches: list[tuple[Any, tuple[int, int], tuple[Any, ...]]]
    constants: dict[str, Any]
    options: dict[str, int]


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    first: Tensor | None = None,
    since: int = 0,
    interpreted: bool = False,
) -> Plan:
    """Check the arguments of :func:`scored_attention` and lay out its launches."""
    import triton.language as tl

    from . import _scored_kernels as kernels

    check(q, k, v, softcap, sinks, window, first, since)
    (batch, heads, queries, dim), (_, kv_heads, tokens, _) = q.shape, k.shape
    q, k, v = (x if x.stride(3) == 1 or dim == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty((batch, heads, queries, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    mass = torch.empty((batch, kv_heads, tokens), dtype=torch.float32, device=q.device)
    if first is not None:
        first = first.clamp(0, tokens).to(torch.int32).contiguous()
    dot = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]
    if q.dtype == torch.bfloat16 and interpreted:
        dot = tl.float32  # the interpreter multiplies bfloat16 bit patterns
    m, n = BLOCKS[q.dtype.itemsize, dim > 128]
    constants: dict[str, Any] = dict(
        GROUP=heads // kv_heads, D=dim, P=max(16, 1 << (dim - 1).bit_length()), M=m, N=n, DOT=dot, SOFTCAP=softcap is not None
    )
    sizes = (float(scaling), float(softcap or 1.0), queries, tokens)
    wide = min(window or EVERYTHING, EVERYTHING)
    both = (*q.stride()[:3], *k.stride()[:3])
    forward = (q, k, v, sinks, first, out, lse, *sizes, heads, wide, *both, *v.stride()[:3])
    masses = (q, k, lse, first, mass, *sizes, kv_heads, wide, since, *both)
    launches: list[tuple[Any, tuple[int, int], tuple[Any, ...]]] = []
    if batch and queries:
        launches.append((kernels.scored_forward, (-(-queries // m), batch * heads), forward))
    if batch and tokens:
        launches.append((kernels.scored_mass, (-(-tokens // n), batch * kv_heads), masses))
    return Plan(out, lse, mass, launches, constants, {"num_warps": 4 if q.dtype.itemsize == 2 else 8, "num_stages": 2})


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    first: Tensor | None,
    since: int,
) -> None:
    """Raise ValueError for what :func:`scored_attention` does not take."""
    if q.ndim != 4 or q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype} {list(q.shape)}, must be float32, float16 or bfloat16 [B, Hq, Q, D]")
    batch, heads, queries, dim = q.shape
    if not 1 <= dim <= 256:
        raise ValueError(f"q has head dim {dim}, must be 1 to 256")
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or x.dtype != q.dtype or x.shape[0] != batch or x.shape[3] != dim:
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}, must be {q.dtype} [{batch}, Hk, N, {dim}]")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {list(k.shape)} and {list(v.shape)}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"q has {heads} heads, k has {k.shape[1]}: the first must be a multiple of the second")
    if k.shape[2] < queries:
        raise ValueError(f"k has {k.shape[2]} tokens, must have at least the {queries} of the queries")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"softcap={softcap} must be greater than 0 and finite, or None")
    if batch * heads > launch.GRID:
        raise ValueError(f"q has {batch} x {heads} rows and heads, must be at most {launch.GRID} together")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}, must be [{heads}]")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window={window} must be at least 1, or None")
    if first is not None and (tuple(first.shape) != (batch,) or first.is_floating_point()):
        raise ValueError(f"first is {first.dtype} {list(first.shape)}, must be integers [{batch}]")
    if not isinstance(since, int) or not 0 <= since <= queries:
        raise ValueError(f"since={since} must be 0 to {queries}, the number of queries")


def scored_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    first: Tensor | None = None,
    since: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`scored_attention` in plain torch, a block of queries at a time; on any device, no triton needed."""
    check(q, k, v, softcap, sinks, window, first, since)
    (batch, heads, queries, _), (_, kv_heads, tokens, _) = q.shape, k.shape
    group = heads // kv_heads
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    mass = torch.zeros((batch, kv_heads, tokens), dtype=torch.float32, device=q.device)
    keys, values = k.float(), v.float()
    n = torch.arange(tokens, device=q.device)
    rows = max(1, PIECE // max(1, batch * heads * tokens))
    for begin in range(0, queries, rows):
        part = q[:, :, begin : begin + rows].float().unflatten(1, (kv_heads, group))
        own = torch.arange(begin, begin + part.shape[3], device=q.device) + tokens - queries
        s = torch.einsum("bhgqd,bhnd->bhgqn", part, keys) * scaling
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        seen = (n <= own[:, None]) & (n > own[:, None] - (window or EVERYTHING))
        seen = seen.expand(batch, *seen.shape)
        if first is not None:
            seen = seen & (n >= first.view(-1, 1, 1))
        s = s.masked_fill(~seen[:, None, None], -torch.inf)
        total = s.logsumexp(-1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.float().view(1, kv_heads, group, 1))
        weights = (s - total.masked_fill(total == -torch.inf, 0.0)[..., None]).exp()
        out[:, :, begin : begin + rows] = torch.einsum("bhgqn,bhnd->bhgqd", weights, values).flatten(1, 2).to(q.dtype)
        lse[:, :, begin : begin + rows] = total.flatten(1, 2)
        mass += weights[:, :, :, max(0, since - begin) :].sum((2, 3))
    return out, lse, mass
