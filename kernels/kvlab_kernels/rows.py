"""What happens to rows of a cache between two steps: kept ones move together, keys are turned to new places."""

from __future__ import annotations

import torch
from torch import Tensor

from . import launch
from .decode import DTYPES

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather_tokens(x: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows ``index`` of a cache, one list for each head: what is left after eviction, moved together.

    ``x``: ``[B, H, N, W]`` of any dtype, last dim contiguous: keys, values, codes or scales. ``index``: int32 or int64 ``[B or 1, H or 1, m]``, each 0 to
    ``N - 1``, any order. ``out``: where to write ``[B, H, m, W]``, no view of ``x``; returned. Bytes are copied as they are.
    Raises ValueError, naming what was given and what is allowed (values of ``index`` are not looked at on a GPU).
    """
    launch.require_triton()
    launch.check_device(x, index, out)
    from . import _row_kernels as kernels

    if x.ndim != 4 or (x.stride(3) != 1 and x.shape[3] > 1):
        raise ValueError(f"x is {list(x.shape)} with strides {list(x.stride())}, must be [B, H, N, W], its last dim contiguous")
    if x.element_size() > 8:
        raise ValueError(f"x is {x.dtype}, must have numbers of at most 8 bytes")
    b, h, n, w = x.shape
    if b * h > launch.GRID:
        raise ValueError(f"x has {b} x {h} rows and heads, must be at most {launch.GRID} together")
    if (
        index.ndim != 3
        or index.shape[0] not in (1, b)
        or index.shape[1] not in (1, h)
        or index.dtype not in (torch.int32, torch.int64)
    ):
        raise ValueError(f"index is {index.dtype} {list(index.shape)}, must be int32 or int64 [1 or {b}, 1 or {h}, m]")
    if index.device.type == "cpu" and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < n:
        raise ValueError(f"index goes from {int(index.min())} to {int(index.max())}, must be 0 to {n - 1}")
    m = index.shape[2]
    if out is None:
        out = torch.empty((b, h, m, w), dtype=x.dtype, device=x.device)
    elif tuple(out.shape) != (b, h, m, w) or out.dtype != x.dtype or (out.stride(3) != 1 and w > 1):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, must be {x.dtype} {[b, h, m, w]}, its last dim contiguous")
    if not out.numel():
        return out
    source, target = _words(x, out)
    index = index.expand(b, h, m)
    if index.stride(2) != 1:
        index = index.contiguous()
    width = source.shape[3]
    columns = min(256, max(4, 1 << (width - 1).bit_length()))
    rows = max(1, 4096 // columns)
    with launch.on(x.device):
        kernels.gather[-(-m // rows), b * h](
        source, index, target, h, m, *source.stride()[:3], *index.stride()[:2], *target.stride()[:3], W=width, ROWS=rows, COLUMNS=columns, num_warps=4
    )  # fmt: skip
    return out


def _words(*tensors: Tensor) -> list[Tensor]:
    """The same bytes as the widest integers that all rows, strides and addresses are whole numbers of."""
    item = tensors[0].element_size()
    size = 8
    while size > item:
        fits = all(
            x.shape[3] * item % size == 0 and x.data_ptr() % size == 0 and all(s * item % size == 0 for s in x.stride()[:3])
            for x in tensors
        )
        if fits:
            break
        size //= 2
    plain = [x.view(_WORDS[item]) for x in tensors]
    return [x.view(_WORDS[size]) for x in plain] if size > item else plain


def rope_shift(
    k: Tensor,
    places: Tensor | int,
    waves: Tensor,
    *,
    interleaved: bool = False,
    back: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Keys turned on by so many places: ``k`` ``[B, H, N, D]``, float32, float16 or bfloat16, last dim contiguous.

    ``places``: an int, or int32 or int64 ``[B or 1, H or 1, N or 1]``: how far each key is moved (StreamingLLM, arXiv 2309.17453, numbers kept tokens anew),
    below 0 for the other way. ``waves``: float32 ``[P, R]``, the cosines of each place (0 to P - 1) and then its sines; the first ``R`` channels are turned, the
    rest stay as they are. ``interleaved``: pairs are neighbours, otherwise halves. ``back``: the other way. ``out``: where to write, ``k`` itself allowed.
    Raises ValueError, naming what is allowed (values of ``places`` are not looked at on a GPU).
    """
    launch.require_triton()
    if k.ndim != 4 or k.dtype not in DTYPES or (k.stride(3) != 1 and k.shape[3] > 1):
        raise ValueError(
            f"k is {k.dtype} {list(k.shape)}, must be float32, float16 or bfloat16 [B, H, N, D], its last dim contiguous"
        )
    b, h, n, d = k.shape
    if waves.ndim != 2 or waves.dtype != torch.float32 or waves.shape[1] % 2 or not 2 <= waves.shape[1] <= d:
        raise ValueError(f"waves is {waves.dtype} {list(waves.shape)}, must be float32 [P, R], R even and 2 to {d}")
    if b * h > launch.GRID:
        raise ValueError(f"k has {b} x {h} rows and heads, must be at most {launch.GRID} together")
    if isinstance(places, int):
        if not -len(waves) < places < len(waves):
            raise ValueError(f"places go to {abs(places)}, waves to {len(waves) - 1}")
        places = torch.full((1, 1, 1), places, dtype=torch.int32, device=k.device)
    if not isinstance(places, Tensor):
        raise ValueError(f"places={places!r} must be a whole number or a tensor of them")
    launch.check_device(k, places, waves, out)
    from . import _row_kernels as kernels

    allowed = ({1, b}, {1, h}, {1, n})
    if (
        places.ndim != 3
        or places.dtype not in (torch.int32, torch.int64)
        or any(s not in ok for s, ok in zip(places.shape, allowed))
    ):
        raise ValueError(f"places is {places.dtype} {list(places.shape)}, must be int32 or int64 [1 or {b}, 1 or {h}, 1 or {n}]")
    if places.device.type == "cpu" and places.numel() and not -len(waves) < int(places.min()) <= int(places.max()) < len(waves):
        raise ValueError(f"places go to {max(-int(places.min()), int(places.max()))}, waves to {len(waves) - 1}")
    if out is None:
        out = torch.empty_like(k, memory_format=torch.contiguous_format)
    elif out.shape != k.shape or out.dtype != k.dtype or (out.stride(3) != 1 and d > 1):
        raise ValueError(f"out is {out.dtype} {list(out.shape)}, must be {k.dtype} {list(k.shape)}, its last dim contiguous")
    if k.numel():
        places, half = places.expand(b, h, n), waves.shape[1] // 2
        waves = waves if waves.stride(1) == 1 else waves.contiguous()
        padded = 1 << (half - 1).bit_length()
        rows = max(1, min(64, 2048 // padded))
        with launch.on(k.device):
            kernels.turn[-(-n // rows), b * h](
            k, places, waves, out, h, n, *k.stride()[:3], *places.stride(), waves.stride(0), *out.stride()[:3], -1.0 if back else 1.0,
            D=d, HALF=half, P=padded, ROWS=rows, STEP=1 if interleaved else half, num_warps=4,
        )  # fmt: skip
    return out
