"""Decode attention over a dense or quantized KV cache, split over the tokens.

Flash-Decoding (Dao et al. 2023; FlashAttention-2, arXiv 2307.08691; FlashDecoding++, arXiv 2311.01282): the tokens of each KV head
are cut into splits that run in parallel, and a second kernel joins the partial outputs by their log-sum-exp. The codes are
read once for a whole GQA group and never written back as a dense copy. Per-channel key scales are folded into the query
(KIVI, arXiv 2402.02750, stores keys so), per-token value scales into the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, isfinite
from typing import Any

import torch
from torch import Tensor

from . import launch
from .layout import FLOATS, WIDTHS, Codes, Places, normal_levels

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_QUERIES = 16
MAX_COLUMNS = 16  # query heads of a group x queries that one program holds; more run as further programs


@dataclass(frozen=True)
class Reading:
    """How a cache is read: the compile-time constants of one side of the kernel. Everything counts in words unless it says otherwise."""

    kind: str  # "dense", "channel" (key scale folded into the query), "rows" (looked up per token), "token" (per token, along the head dim)
    format: str  # "dense", or that of the codes
    bits: int  # of a field of a byte; 8 for dense, 2 for codes of three bits, whose third bits lie behind
    word: int  # bytes of codes in a word; 1 for dense, whose word is an element
    fields: int  # codes in a word
    parts: int  # fields x chunks
    plane: int  # bytes of a row of codes, which is also how far the fields of a byte are apart, in channels
    chunk: int  # bytes of a piece of a row; each of its fields lies within one scale group
    width: int  # words of a chunk
    padded: int  # the same as a power of two
    row: int  # stride of a token
    align: int  # a power of two that divides the other strides
    group: int  # tokens or channels that share a scale
    groups: int  # scale groups along the head dim
    scale_row: int  # elements from one row of scales to the next
    dot: Any  # Triton's dtype for the products; they are summed in float32
    half: bool  # codes multiplied in float16
    fast: bool  # unpacked two at a time by machine instructions
    lift: bool  # may be multiplied before the offset of unpacking is taken off
    pairs: bool  # zeros of neighbouring channels may be loaded two at a time
    zeros: bool  # codes have zero points
    middle: int  # of the range of integer codes, from which values (and keys without zero points) are taken; else 0
    third: bool  # codes of three bits
    page: int  # tokens of a page; 0 where they lie one behind the other
    page_row: int  # stride of a page
    scale_page: int  # elements from the scales of one page to the next
    ranged: bool  # scales per channel that are float32 and are brought into float16's range
    turn: int  # half of the channels that are turned by the token's place when read; 0: none
    waves: int  # elements from one place's cosines and sines to the next


@dataclass(frozen=True)
class Side:
    """Keys or values as the kernel takes them: a tensor of words, and how to read it."""

    words: Tensor
    reading: Reading
    codes: Codes | None = None

    @property
    def strides(self) -> tuple[int, int]:
        """Batch and head strides in units of ``align``; rows of a batch share the pages."""
        batch = 0 if self.reading.page else self.words.stride(0) // self.reading.align
        return batch, self.words.stride(1) // self.reading.align

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self.codes is None else (self.codes.scale, self.codes.zero)

    @property
    def scale_strides(self) -> tuple[int, int]:
        if self.codes is None:
            return 0, 0
        return 0 if self.reading.page else self.codes.scale.stride(0), self.codes.scale.stride(1)


def decode_attention(
    q: Tensor,
    k: Tensor | Codes,
    v: Tensor | Codes,
    *,
    scaling: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    length: int | Tensor | None = None,
    start: int | Tensor | None = None,
    residual_k: Tensor | None = None,
    residual_v: Tensor | None = None,
    places: Places | None = None,
    splits: int | None = None,
    settings: launch.Settings | None = None,
) -> tuple[Tensor, Tensor]:
    """``softmax(scaling * q @ k.T + bias) @ v`` for one or a few queries; returns ``(out, lse)``.

    ``q``: ``[B, Hq, Q, D]``, float32, float16 or bfloat16, ``Q`` from 1 to 16.
    ``k``, ``v``: dense ``[B, Hk, N, D]`` or :class:`~kvlab_kernels.layout.Codes` of that shape, each of its own kind; keys on axis "channel"
    (with or without ``group``) or "token", values on axis "token". ``Hq`` is a multiple of ``Hk``. Only the last dim must be contiguous.
    ``residual_k``, ``residual_v``: dense ``[B, Hk, R, D]``, attended after the first ``N`` tokens.
    ``bias``: float ``[B or 1, Hk or 1, Q or 1, N + R]``, added to the scores; ``-inf`` hides a token. Padding, windows, causality, kept columns
    and the log counts of merged tokens come this way.
    ``softcap``: scores become ``softcap * tanh(score / softcap)`` before the bias. ``sinks``: ``[Hq]``, logits that join the denominator only.
    ``length``: how many of the ``N`` tokens count, an int or an integer tensor ``[B]`` or ``[B, Hk]`` (values of a tensor beyond ``N`` count as ``N``).
    ``start``: the first token that counts, likewise (0): padding on the left, a window, a head that holds fewer. What is left out is not read.
    ``places``: keys ``k`` lie as they were before RoPE and are turned in registers by where they stand; residual keys are not.
    ``splits``: how many parts the ``N`` tokens are cut into; by default what fills the device.

    ``out``: ``[B, Hq, Q, D]`` in q's dtype; ``lse``: float32 ``[B, Hq, Q]``, the natural log of the denominator, a sink included.
    A query that sees nothing gets ``out = 0`` and ``lse = -inf``.

    With 16-bit queries codes are multiplied in float16 (they are exact there; queries, value scales
    and float32 key scales are brought into its range first, float16 key scales are taken as they are)
    and summed in float32. Values of tensors (``columns`` of places, say) are not looked at on a GPU. Raises ValueError, naming what was given and what is allowed.
    """
    return _run(q, k, v, None, scaling=scaling, bias=bias, softcap=softcap, sinks=sinks, length=length, start=start, residual_k=residual_k,
                residual_v=residual_v, places=places, splits=splits, settings=settings)[:2]  # fmt: skip


def paged_decode_attention(
    q: Tensor,
    k: Tensor | Codes,
    v: Tensor | Codes,
    table: Tensor,
    *,
    scaling: float,
    length: int | Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    start: int | Tensor | None = None,
    residual_k: Tensor | None = None,
    residual_v: Tensor | None = None,
    places: Places | None = None,
    splits: int | None = None,
    settings: launch.Settings | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`decode_attention` over tokens that lie in pages (PagedAttention, arXiv 2309.06180), of any lengths in one launch.

    ``k``, ``v``: dense ``[P, Hk, page, D]`` or Codes of that shape, a pool of ``P`` pages that all rows of the batch share; a view of vLLM's
    ``[P, page, Hk, D]`` will do. Channel groups divide the page. Pages of one head each are ``[P, 1, page, D]`` with as many heads by ``expand``.
    ``table``: int32 ``[B, Hk or 1, M]``: token ``n`` of a row (and head) is row ``n % page`` of page ``table[b, h, n // page]``. Entries for tokens that do
    not count are not read. ``length``: tokens that count, as there; so ``N`` is ``M * page``. Everything else as there, ValueErrors too.
    """
    return _run(q, k, v, table, scaling=scaling, bias=bias, softcap=softcap, sinks=sinks, length=length, start=start, residual_k=residual_k,
                residual_v=residual_v, places=places, splits=splits, settings=settings)[:2]  # fmt: skip


def scored_decode_attention(
    q: Tensor, k: Tensor | Codes, v: Tensor | Codes, table: Tensor | None = None, *, since: int = 0, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`decode_attention` (with a ``table``, :func:`paged_decode_attention`) that also says how much of it each key got; ``(out, lse, mass)``.

    ``mass``: float32 ``[B, Hk, N + R]``, of each key the softmax weights that it got from the queries from ``since`` on, added up over them and over the
    query heads that share it (H2O, arXiv 2306.14048); 0 for tokens that do not count. A second pass over the keys, whose log-sum-exp is then known;
    nothing of queries x keys is held, and every key is added up in one order. Options and errors are theirs.
    """
    out, lse, mass = _run(q, k, v, table, since=since, **options)
    assert mass is not None
    return out, lse, mass


def _run(
    q: Tensor, k: Tensor | Codes, v: Tensor | Codes, table: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    launch.require_triton()
    places = options.get("places")
    more = (places.waves, places.columns) if places is not None else ()
    names = ("length", "start", "bias", "sinks", "residual_k", "residual_v")
    device = launch.check_device(
        q, *_tensors(k), *_tensors(v), table, *more, *(x for name in names if isinstance(x := options.get(name), Tensor))
    )
    from . import _decode_kernels as kernels

    work = plan(q, k, v, table=table, device=device, interpreted=launch.interpreting(), **options)
    if work.out.numel():
        with launch.on(device):
            kernels.decode_split[work.split_grid](*work.split_args, **work.split_constants, **work.options)
            kernels.decode_merge[work.merge_grid](*work.merge_args, **work.merge_constants, num_warps=2)
            if work.mass is not None:
                kernels.decode_split[work.mass_grid](*work.mass_args, **work.mass_constants, **work.options)
    return work.out, work.lse, None if work.mass is None else work.mass.sum(0)


@dataclass(frozen=True)
class Plan:
    """The launches of one call, two or with mass three, ready to run (or, on meta tensors, to compile)."""

    out: Tensor
    lse: Tensor
    split_grid: tuple[int, int]
    split_args: tuple
    split_constants: dict[str, object]
    options: dict[str, int]
    merge_grid: tuple[int, int]
    merge_args: tuple
    merge_constants: dict[str, int]
    mass: Tensor | None  # one for each block of query rows
    mass_grid: tuple[int, int]
    mass_args: tuple
    mass_constants: dict[str, object]


def plan(
    q: Tensor,
    k: Tensor | Codes,
    v: Tensor | Codes,
    scaling: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    length: int | Tensor | None = None,
    start: int | Tensor | None = None,
    residual_k: Tensor | None = None,
    residual_v: Tensor | None = None,
    places: Places | None = None,
    splits: int | None = None,
    settings: launch.Settings | None = None,
    table: Tensor | None = None,
    since: int | None = None,
    device: torch.device | None = None,
    interpreted: bool = False,
) -> Plan:
    """Check the arguments of :func:`decode_attention` (with a ``table``, of :func:`paged_decode_attention`) and lay out its launches.

    ``since``: also lay out the launch that adds up what each key is given. ``device``: whose settings to take, by default q's.
    """
    device = device or q.device
    _check_numbers(scaling, softcap, splits, settings)
    if table is not None and (table.ndim != 3 or table.dtype != torch.int32):
        raise ValueError(f"table is {table.dtype} {list(table.shape)}, must be int32 [B, Hk or 1, M]")
    batch, heads, queries, dim = _check_query(q)
    q = q if q.stride(3) == 1 else q.contiguous()
    paged = table is not None
    key = _side("k", k, q, interpreted, paged, _turned(places, dim))
    value = _side("v", v, q, interpreted, paged)
    kv_heads, n = key.words.shape[1:3]
    if table is not None:
        if length is None:
            raise ValueError("length is None, must say how many tokens of each row count where tokens lie in pages")
        if n < 1:
            raise ValueError("k has pages of 0 tokens, must be 1 or more")
        if table.shape[0] != batch or table.shape[1] not in (1, kv_heads):
            raise ValueError(f"table is {list(table.shape)}, must be [{batch}, {kv_heads} or 1, M]")
        n *= table.shape[2]
        table = table.expand(batch, kv_heads, -1)
        table = table if table.stride(2) == 1 else table.contiguous()
    _check_pair("k", key, "v", value)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q has {heads} heads, k has {kv_heads}: the first must be a multiple of the second")
    if (residual_k is None) != (residual_v is None):
        raise ValueError("residual_k and residual_v must be given together")
    tail_k = tail_v = None
    tail_n = 0
    if residual_k is not None and residual_v is not None:
        tail_k, tail_v = _side("residual_k", residual_k, q, interpreted), _side("residual_v", residual_v, q, interpreted)
        _check_pair("residual_k", tail_k, "residual_v", tail_v)
        if tail_k.codes is not None or tail_v.codes is not None:
            raise ValueError("residual_k and residual_v are Codes, must be dense tensors")
        if tail_k.words.shape[1] != kv_heads:
            raise ValueError(f"residual_k has {tail_k.words.shape[1]} heads, k has {kv_heads}")
        tail_n = tail_k.words.shape[2]
        if tail_n == 0:
            tail_k = tail_v = None
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {list(sinks.shape)}, must be [{heads}]")
    if since is not None and not (_whole(since) and 0 <= since <= queries):
        raise ValueError(f"since={since} must be 0 to {queries}, the number of queries")
    bias = _check_bias(bias, batch, kv_heads, queries, n + tail_n)
    length, counted = _check_length("length", length, batch, kv_heads, n)
    start, begins = _check_length("start", 0 if start is None else start, batch, kv_heads, n)
    if start is None and begins:
        start = torch.full((1, 1), begins, dtype=torch.int32, device=q.device).expand(batch, kv_heads)
    stands = _check_places(places, batch, kv_heads, n)

    rows = heads // kv_heads * queries
    columns = min(MAX_COLUMNS, max(8, _power_of_2(rows)))
    blocks = -(-rows // columns)
    if settings is None:
        settings = _settings(device, key, value, columns, dim, bias is not None or softcap is not None)
    block_n = settings.block_n
    if key.reading.kind == "channel":
        block_n = min(block_n, key.reading.group & -key.reading.group)  # a tile must lie within one group
    if splits is None:
        splits = launch.splits(device, batch * kv_heads * blocks, counted, settings)
    split_tiles = -(-max(counted, 1) // (splits * block_n))
    levels = [_levels(x.codes, q.device) for x in (key, value)]
    parts = splits + (tail_k is not None)

    part_out = torch.empty((batch * heads * queries, parts, dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((batch * heads * queries, parts), dtype=torch.float32, device=q.device)
    out = torch.empty((batch, heads, queries, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    group = key.codes.group if key.codes is not None else None

    def pair(x: Tensor | None) -> tuple[int, ...]:
        return x.stride()[:2] if x is not None else (0, 0)

    def arguments(numbers: Tensor, sums: Tensor) -> tuple:
        return (
            q, key.words, *key.scales, group, levels[0], value.words, *value.scales, levels[1], tail_k.words if tail_k else None,
            tail_v.words if tail_v else None, bias, table, length, start, places.waves if places is not None else None, stands,
            numbers, sums, float(scaling), float(softcap or 1.0),
            counted, tail_n, split_tiles, splits, parts, kv_heads, rows, *q.stride()[:3], *key.strides, *value.strides,
            *key.scale_strides, *(group.stride() if group is not None else (0, 0, 0)), *value.scale_strides,
            *(tail_k.strides if tail_k else (0, 0)), *(tail_v.strides if tail_v else (0, 0)), *(bias.stride() if bias is not None else (0, 0, 0, 0)), n,
            *pair(table), *pair(length), *pair(start), *(stands.stride() if stands is not None else (0, 0, 0)), places.start if places is not None else 0,
            since or 0,
        )  # fmt: skip

    split_constants: dict[str, object] = dict(
        K=key.reading, V=value.reading, TK=tail_k.reading if tail_k else None, TV=tail_v.reading if tail_v else None,
        D=dim, Q=queries, M=columns, BLOCK_N=block_n, STAGES=settings.num_stages, SOFTCAP=softcap is not None,
        WHOLE=length is None and start is None and counted % block_n == 0, MASS=False,
    )  # fmt: skip
    mass = None if since is None else torch.zeros((blocks, batch, kv_heads, n + tail_n), dtype=torch.float32, device=q.device)
    nothing = replace(
        key.reading, kind="dense", zeros=False, parts=1, fields=1, groups=1
    )  # of values, which the second pass does not read
    block_p, block_d = min(32, max(2, _power_of_2(parts))), min(64, _power_of_2(dim))
    return Plan(
        out,
        lse,
        (batch * kv_heads * blocks, parts),
        arguments(part_out, part_lse),
        split_constants,
        settings.options(),
        (batch * heads * queries, -(-dim // block_d)),
        (part_out, part_lse, sinks, out, lse, parts, heads, queries),
        dict(D=dim, BLOCK_D=block_d, BLOCK_P=block_p),
        mass,
        (batch * kv_heads * blocks, parts),
        arguments(mass, lse) if mass is not None else (),
        split_constants | dict(V=nothing, MASS=True),
    )


def _whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _check_numbers(scaling: float, softcap: float | None, splits: int | None, settings: launch.Settings | None) -> None:
    for name, value in (("scaling", scaling), ("softcap", softcap)):
        if value is None and name == "softcap":
            continue
        if not isinstance(value, int | float) or not isfinite(value):
            raise ValueError(f"{name}={value!r} must be a finite number")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be greater than 0, or None")
    if splits is not None and (not _whole(splits) or not 1 <= splits <= launch.GRID):
        raise ValueError(f"splits={splits!r} must be 1 to {launch.GRID}, or None")
    if settings is not None:
        settings.check()


def _settings(device: torch.device, key: Side, value: Side, columns: int, dim: int, extras: bool) -> launch.Settings:
    bits = min(side.reading.bits if side.codes is not None else 16 for side in (key, value))
    if any(side.reading.dot.primitive_bitwidth == 32 for side in (key, value)):
        bits = 32
    rebuilt = key.reading.kind == "rows" or key.reading.turn > 0
    unusual = any(side.reading.third or side.reading.format == "normal" for side in (key, value))
    return launch.settings(device, bits, dim, columns, extras or key.reading.page > 0 or unusual, rebuilt)


def _turned(places: Places | None, dim: int) -> tuple[int, int]:
    """Half of the channels that are turned, and the stride of a place's cosines and sines."""
    if places is None:
        return 0, 0
    waves = places.waves
    if (
        waves.ndim != 2
        or waves.dtype != torch.float32
        or waves.shape[1] % 2
        or not 2 <= waves.shape[1] <= dim
        or waves.stride(1) != 1
    ):
        raise ValueError(
            f"places.waves is {waves.dtype} {list(waves.shape)}, must be float32 [P, R], its rows contiguous, R even and 2 to the head dim, {dim}"
        )
    return waves.shape[1] // 2, waves.stride(0)


def _check_places(places: Places | None, batch: int, kv_heads: int, n: int) -> Tensor | None:
    if places is None:
        return None
    columns = places.columns
    if not _whole(places.start):
        raise ValueError(f"places.start={places.start!r} must be a whole number")
    if columns is None:
        if places.start < 0 or places.start + n > len(places.waves):
            raise ValueError(f"places.start={places.start} with {n} tokens needs waves for each, there are {len(places.waves)}")
        return None
    allowed = ({1, batch}, {1, kv_heads}, {n})
    if columns.ndim != 3 or columns.dtype != torch.int32 or any(size not in ok for size, ok in zip(columns.shape, allowed)):
        raise ValueError(
            f"places.columns is {columns.dtype} {list(columns.shape)}, must be int32 [1 or {batch}, 1 or {kv_heads}, {n}]"
        )
    if columns.device.type == "cpu" and columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < len(places.waves):
        raise ValueError(
            f"places.columns go from {int(columns.min())} to {int(columns.max())}, waves from 0 to {len(places.waves) - 1}"
        )
    return columns.expand(batch, kv_heads, n)


_LEVELS: dict[tuple[int, torch.device], Tensor] = {}


def _levels(x: Codes | None, device: torch.device) -> Tensor | None:
    """The levels that codes of format "normal" number; kept, so that no step copies them to the device again."""
    if x is None or x.format != "normal":
        return None
    if (x.bits, device) not in _LEVELS:
        _LEVELS[x.bits, device] = torch.tensor(normal_levels(x.bits), device=device)
    return _LEVELS[x.bits, device]


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _tensors(x: Tensor | Codes) -> list[Tensor | None]:
    return [x] if isinstance(x, Tensor) else [x.codes, x.scale, x.zero, x.group]


def _check_query(q: Tensor) -> tuple[int, int, int, int]:
    if q.ndim != 4:
        raise ValueError(f"q has {q.ndim} dims, must be [B, Hq, Q, D]")
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}, must be float32, float16 or bfloat16")
    batch, heads, queries, dim = q.shape
    if not 1 <= queries <= MAX_QUERIES:
        raise ValueError(f"q has {queries} queries, must be 1 to {MAX_QUERIES}")
    if not 1 <= dim <= 256:
        raise ValueError(f"q has head dim {dim}, must be 1 to 256")
    return batch, heads, queries, dim


def _check_pair(a: str, x: Side, b: str, y: Side) -> None:
    if x.words.shape[:3] != y.words.shape[:3]:
        raise ValueError(
            f"{a} and {b} must agree in batch, heads and tokens, got {list(x.words.shape[:3])} and {list(y.words.shape[:3])}"
        )


def _check_bias(bias: Tensor | None, batch: int, kv_heads: int, queries: int, tokens: int) -> Tensor | None:
    if bias is None:
        return None
    allowed = [{1, batch}, {1, kv_heads}, {1, queries}, {tokens}]
    if bias.ndim != 4 or not bias.is_floating_point() or any(size not in ok for size, ok in zip(bias.shape, allowed)):
        raise ValueError(
            f"bias is {bias.dtype} {list(bias.shape)}, must be floating point [1 or {batch}, 1 or {kv_heads}, 1 or {queries}, {tokens}]"
        )
    return bias.expand(batch, kv_heads, queries, tokens)


def _check_length(name: str, length: int | Tensor | None, batch: int, kv_heads: int, n: int) -> tuple[Tensor | None, int]:
    """-> (a number for each row and head, or None; the number for all, or the most there can be)."""
    if isinstance(length, Tensor):
        if tuple(length.shape) not in ((batch,), (batch, kv_heads)) or length.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} is {length.dtype} {list(length.shape)}, must be int32 or int64 [{batch}] or [{batch}, {kv_heads}]"
            )
        return (length[:, None] if length.ndim == 1 else length).expand(batch, kv_heads), n
    if length is None:
        return None, n
    if not _whole(length) or not 0 <= length <= n:
        raise ValueError(f"{name}={length!r} must be 0 to {n}, the tokens in k")
    return None, int(length)


def _side(
    name: str, x: Tensor | Codes, q: Tensor, interpreted: bool, paged: bool = False, turn: tuple[int, int] = (0, 0)
) -> Side:
    """Check keys or values and say how the kernel shall read them. ``turn``: see :func:`_turned`."""
    dim = q.shape[3]
    batch = (x if isinstance(x, Tensor) else x.codes).shape[0] if paged else q.shape[0]
    if isinstance(x, Tensor):
        if x.ndim != 4 or x.shape[0] != batch or x.shape[3] != dim:
            raise ValueError(
                f"{name} has shape {list(x.shape)}, must be [{'P' if paged else batch}, Hk, {'page' if paged else 'N'}, {dim}]"
            )
        if x.dtype not in DTYPES:
            raise ValueError(f"{name} is {x.dtype}, must be float32, float16, bfloat16 or Codes")
        if dim > 1 and x.stride(3) != 1:
            raise ValueError(f"{name} has stride {x.stride(3)} in its last dim, must be 1")
        dot = x.dtype if x.dtype == q.dtype else torch.float32
        if interpreted and dot == torch.bfloat16:
            dot = torch.float32  # the interpreter multiplies bfloat16 bit patterns
        return Side(x, _reading(x, None, "dense", 1, dim, gcd(dim, turn[0]), dot, paged, turn))

    _check_codes(name, x, batch, dim, paged)
    dot = torch.float32 if q.dtype == torch.float32 else torch.float16
    plane = dim * (2 if x.bits == 3 else x.bits) // 8
    kind, chunk = x.axis, gcd(plane, turn[0])
    if x.axis == "token":
        chunk = gcd(chunk, x.group_size)
    elif name == "v":
        raise ValueError("v has axis='channel', must be 'token'")
    elif x.group is not None or x.group_size & -x.group_size < 16:
        kind = "rows"
    words, word = x.codes, 1
    if chunk % 2 == 0 and _even(x.codes) and (x.bits != 3 or plane % 4 == 0):
        words, word = x.codes.view(torch.int16), 2
    if dot == torch.float16 and x.scale.dtype == torch.float32 and (kind == "rows" or turn[0]):
        dot = torch.float32  # keys that are rebuilt may be larger than float16 knows
    half = dot == torch.float16
    fast = half and word == 2 and x.format != "normal" and x.bits != 3  # what machine instructions unpack
    pairs = (
        kind == "channel" and word == 2 and x.zero is not None and x.zero.dtype == torch.float16 and _even(x.zero) and not turn[0]
    )
    reading = _reading(words, x, kind, word, dim, chunk, dot, paged, turn)
    lift = fast and x.format == "int" and x.zero is not None and not turn[0]
    ranged = half and kind == "channel" and x.scale.dtype == torch.float32
    return Side(words, replace(reading, half=half, fast=fast and not interpreted, lift=lift, pairs=pairs, ranged=ranged), x)


def _reading(
    words: Tensor,
    x: Codes | None,
    kind: str,
    word: int,
    dim: int,
    chunk: int,
    dot: torch.dtype,
    paged: bool,
    turn: tuple[int, int],
) -> Reading:
    from triton import language as tl

    bits = 8 if x is None else 2 if x.bits == 3 else x.bits
    group, scale_row, scale_page = (dim, 0, 0) if x is None else (x.group_size, x.scale.stride(2), x.scale.stride(0))
    plane, fields = dim * bits // 8, 8 * word // bits
    return Reading(
        kind=kind, format="dense" if x is None else x.format, bits=bits, word=word, fields=fields, parts=plane // chunk * fields, plane=plane, chunk=chunk,
        width=chunk // word, padded=max(16, _power_of_2(chunk // word)), row=words.stride(2), align=_alignment(words), group=group,
        groups=dim // group if x is not None and kind == "token" else 1, scale_row=scale_row,
        dot={torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dot],
        half=False, fast=False, lift=False, pairs=False, zeros=x is not None and x.zero is not None,
        middle=2 ** (x.bits - 1) if x is not None and x.format == "int" else 0, third=x is not None and x.bits == 3,
        page=words.shape[2] if paged else 0, page_row=words.stride(0) if paged else 0, scale_page=scale_page if paged else 0,
        ranged=False, turn=turn[0], waves=turn[1],
    )  # fmt: skip


def _even(x: Tensor) -> bool:
    """Whether the rows of ``x`` start at even elements, so that two neighbours can be read as one."""
    return all(s % 2 == 0 for s in (x.storage_offset(), *x.stride()[:3]))


def _alignment(x: Tensor) -> int:
    """The largest power of two, up to 16 bytes, that divides the strides of batch and head: what the compiler may rely on."""
    return gcd(16 // x.element_size(), x.stride(0), x.stride(1))


def _check_codes(name: str, x: Codes, batch: int, dim: int, paged: bool) -> None:
    """The promises of :class:`Codes` that a kernel relies on."""
    allowed = {"int": WIDTHS, "normal": (4, 3, 2), **dict.fromkeys(FLOATS, (8,))}
    if x.format not in allowed:
        raise ValueError(f"{name} has format={x.format!r}, must be one of {tuple(allowed)}")
    if x.bits not in allowed[x.format]:
        raise ValueError(f"{name} has bits={x.bits}, must be one of {allowed[x.format]} for format={x.format!r}")
    if x.axis not in ("channel", "token"):
        raise ValueError(f"{name} has axis={x.axis!r}, must be 'channel' or 'token'")
    if x.codes.ndim != 4 or x.codes.dtype != torch.uint8 or x.codes.shape[0] != batch or x.codes.shape[3] * 8 != dim * x.bits:
        raise ValueError(
            f"{name}.codes is {x.codes.dtype} {list(x.codes.shape)}, must be uint8 [{batch}, Hk, N, {dim * x.bits / 8:g}]"
        )
    if x.codes.stride(3) != 1 and x.codes.shape[3] > 1:
        raise ValueError(f"{name}.codes has stride {x.codes.stride(3)} in its last dim, must be 1")
    if x.group_size < 1 or (x.axis == "token" and dim % x.group_size):
        raise ValueError(f"{name} has group_size={x.group_size}, must be a positive divisor of the head dim {dim}" if x.axis == "token" else
                         f"{name} has group_size={x.group_size}, must be at least 1")  # fmt: skip
    heads, n = x.codes.shape[1:3]
    if paged and x.group is not None:
        raise ValueError(f"{name} has a table of groups, which tokens in pages cannot have")
    if paged and x.axis == "channel" and n % x.group_size:
        raise ValueError(f"{name} has group_size={x.group_size}, must divide the page, {n} tokens")
    want = (batch, heads, n, dim // x.group_size)
    if x.axis == "channel":
        groups = x.scale.shape[2] if x.scale.ndim == 4 else 0
        want = (batch, heads, groups if x.group is not None else max(groups, -(-n // x.group_size)), dim)
    for what, t in (("scale", x.scale), ("zero", x.zero)):
        if t is None:
            continue
        if tuple(t.shape) != want or t.dtype not in (torch.float16, torch.float32):
            raise ValueError(f"{name}.{what} is {t.dtype} {list(t.shape)}, must be float16 or float32 {list(want)}")
        if t.stride(3) != 1 and t.shape[3] > 1:
            raise ValueError(f"{name}.{what} has stride {t.stride(3)} in its last dim, must be 1")
    if x.zero is not None and x.scale.stride() != x.zero.stride():
        raise ValueError(f"{name}.scale and {name}.zero must have the same strides, got {x.scale.stride()} and {x.zero.stride()}")
    if x.group is not None and (x.group.dtype != torch.int32 or tuple(x.group.shape) != (batch, heads, n)):
        raise ValueError(f"{name}.group is {x.group.dtype} {list(x.group.shape)}, must be int32 {[batch, heads, n]}")
