"""Products with cached keys and values on a processor, straight from the codes: machine code made with llvmlite, once a shape.

A decode step multiplies a few queries with very many keys. As a matrix product that is too flat for a BLAS, and unpacking the codes first costs
more than the product. Here four query rows share each load of a key or value, codes become floats in registers, per-channel key scales are
folded into the query once a group (KIVI, arXiv 2402.02750) and per-token value scales into the weights. Everything is summed in float32.

llvmlite is optional: :func:`available` says whether it is there, and torch's way serves without it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.util
import math
import os

import torch
from torch import Tensor

from .layout import Codes, Places

MAX_ROWS = 16  # query rows a KV head; more are a matrix product that a BLAS does better
SMALL = 1 << 17  # numbers read; below it waking a second thread costs more than it saves


@functools.cache
def available() -> bool:
    """Whether llvmlite is installed (and ``KVLAB_COMPILED=0`` does not forbid it)."""
    return os.environ.get("KVLAB_COMPILED") != "0" and importlib.util.find_spec("llvmlite") is not None


def serves(rows: Tensor, x: Tensor | Codes) -> bool:
    """Whether :func:`score` and :func:`mix` take query rows ``[B, H, M, ..]`` (or weights) against keys or values ``x``."""
    codes = x.codes if isinstance(x, Codes) else x
    kind = isinstance(x, Codes) or x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    dim = x.head_dim if isinstance(x, Codes) else x.shape[-1]
    learning = torch.is_grad_enabled() and rows.requires_grad  # machine code has no backward pass
    return not learning and rows.shape[2] <= MAX_ROWS and codes.device.type == "cpu" and kind and dim % 8 == 0 and available()


def score(query: Tensor, keys: Tensor | Codes, places: Places | None = None) -> Tensor:
    """``query @ keys.T``: ``[B, H, M, D]`` with M up to 16, keys ``[B, H, N, D]`` -> float32 ``[B, H, M, N]``; with ``places``, of turned keys.

    Raises ``ValueError`` for shapes that do not fit and ``ImportError`` without llvmlite.
    """
    b, h, m, d = query.shape
    side = _Side(keys)
    if m > MAX_ROWS or (side.batch, side.heads, side.dim) != (b, h, d):
        raise ValueError(
            f"query {list(query.shape)} does not fit keys [{side.batch}, {side.heads}, {side.tokens}, {side.dim}] (rows: 1 to {MAX_ROWS})"
        )
    rows = query.float().contiguous()
    sums = rows
    if side.axis == "token":  # what a group's zero point is multiplied with
        sums = rows.unflatten(3, (d // side.group, side.group)).sum(-1)
    out = torch.empty((b, h, m, side.tokens), dtype=torch.float32)
    _run("score", side, m, rows, sums, out, places)
    return out


def mix(weights: Tensor, values: Tensor | Codes) -> Tensor:
    """``weights @ values``: ``[B, H, M, N]`` with M up to 16, values ``[B, H, N, D]`` -> float32 ``[B, H, M, D]``.

    Values as codes have their scales per token. Raises ``ValueError`` for shapes that do not fit and ``ImportError`` without llvmlite.
    """
    b, h, m, n = weights.shape
    side = _Side(values)
    if m > MAX_ROWS or (side.batch, side.heads, side.tokens) != (b, h, n):
        raise ValueError(
            f"weights {list(weights.shape)} do not fit values [{side.batch}, {side.heads}, {side.tokens}, {side.dim}] (rows: 1 to {MAX_ROWS})"
        )
    if side.axis == "channel":
        raise ValueError("values with scales per channel are not read here (allowed: per token)")
    rows = weights.float()
    if rows.stride(3) != 1 or rows.stride(1) != m * rows.stride(2) or rows.stride(0) != h * rows.stride(1):
        rows = rows.contiguous()
    out = torch.empty((b, h, m, side.dim), dtype=torch.float32)
    _run("mix", side, m, rows, rows, out)
    return out


def _run(what: str, side: _Side, m: int, rows: Tensor, sums: Tensor, out: Tensor, places: Places | None = None) -> None:
    from . import _cpu_code as code

    heads = side.batch * side.heads
    if not side.tokens or not heads:
        out.zero_()
        return
    work = heads * side.tokens * side.dim
    threads = torch.get_num_threads() if work > SMALL else 1
    # tokens are cut where there are fewer heads than threads; a mix over cut tokens would have to be summed up, so it cuts channels
    splits = 1 if heads % threads == 0 else threads
    reading, where = side.reading, (0, 0, 0, 0)
    if places is not None:
        columns = places.columns
        if columns is not None:
            columns = columns.expand(side.batch, side.heads, -1).contiguous()
        reading = dataclasses.replace(reading, turn=places.waves.shape[1], placed=columns is not None)
        where = (places.waves.data_ptr(), 0 if columns is None else columns.data_ptr(), side.tokens * 4, places.start)
    arguments = (
        *(t.data_ptr() for t in (rows, sums, side.data, side.scale, side.zero, side.table, out)),
        side.tokens, *side.strides, rows.stride(2) * 4, out.stride(2) * 4, heads, splits, *where,
    )  # fmt: skip
    code.call(what, reading, side.dim, m, threads, arguments)


class _Side:
    """Keys or values as the machine code takes them; one row after the other within a head, ``[B * H]`` heads evenly apart."""

    def __init__(self, x: Tensor | Codes) -> None:
        from ._cpu_code import Reading

        none = _NONE
        if isinstance(x, Codes):
            half = x.scale.dtype == torch.float16
            self.data, self.scale = _rows(x.codes), _rows(x.scale)
            self.zero = none if x.zero is None else _rows(x.zero)
            self.table = none if x.group is None else _rows(x.group)
            self.axis, self.group, self.dim = x.axis, x.group_size, x.head_dim
            self.reading = Reading(x.format, x.bits, x.axis, x.group_size, x.group is not None, half, x.zero is None)
        else:
            self.data, self.scale, self.zero, self.table = _rows(x), none, none, none
            self.axis, self.group, self.dim = "", 1, x.shape[3]
            self.reading = Reading(str(x.dtype).removeprefix("torch."))
        self.batch, self.heads, self.tokens = self.data.shape[:3]

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one head to the next: data, scale, zero, table."""
        return tuple(t.stride(1) * t.element_size() for t in (self.data, self.scale, self.zero, self.table))


_NONE = torch.zeros((1, 1, 1), dtype=torch.int32)


def _rows(x: Tensor) -> Tensor:
    """``x`` ``[B, H, n, ...]`` itself where rows follow each other and all heads are evenly apart (a view of the rows in use), else a copy."""
    fits = x.stride(2) == math.prod(x.shape[3:]) and (x.dim() < 4 or x.stride(3) == 1)
    return x if fits and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)) else x.contiguous()


@functools.cache
def openmp() -> tuple[int, int, int]:
    """Addresses of ``GOMP_parallel``, ``omp_get_thread_num`` and ``omp_get_num_threads`` in the OpenMP that torch has loaded; zeros if there is none.

    The same threads as torch's: a second pool would fight the first one's threads, which spin for a while after each of torch's calls.
    """
    for name in (None, "libgomp.so.1", "libomp.so", "libiomp5.so"):
        try:
            library = ctypes.CDLL(name)
            symbols = [getattr(library, symbol) for symbol in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")]
        except (OSError, AttributeError):
            continue
        return tuple(ctypes.cast(symbol, ctypes.c_void_p).value or 0 for symbol in symbols)  # type: ignore[return-value]
    return 0, 0, 0
