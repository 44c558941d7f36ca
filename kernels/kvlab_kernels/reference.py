"""Plain torch versions of the kernels: what runs on a CPU, and what the Triton kernels are compared with. No triton needed."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import BITS, Codes

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALE_DTYPES = (torch.float16, torch.float32)
PIECE = 1 << 20  # elements that are held in float32 at a time


def quantize_torch(
    x: Tensor, bits: int, axis: str, group_size: int, scale_dtype: torch.dtype = torch.float16, out: Codes | None = None
) -> Codes:
    """Asymmetric min/max quantization (KIVI, arXiv 2402.02750) of ``x`` ``[B, H, N, D]`` to packed codes, in plain torch.

    ``axis="channel"``: one scale per channel and ``group_size`` tokens, of which ``N`` is a multiple. ``axis="token"``: one scale per token and
    ``group_size`` channels, of which ``D`` is a multiple. ``zero = min`` and ``scale = (max - min) / (2**bits - 1)`` are rounded to ``scale_dtype``
    (saturating at its largest number), then ``code = round((x - zero) / scale)``, half to even, clamped: so the codes fit the numbers
    that are stored. A constant group has scale 0 and codes 0.

    ``out``: codes to write into (views of a cache's storage, say); returned. Raises ValueError for what does not fit.
    """
    out = destination(x, bits, axis, group_size, scale_dtype, out)
    assert out.zero is not None  # destination() saw to it
    n = x.shape[2]
    row = max(1, x[:, :, :1].numel())
    step = max(1, PIECE // row)
    if axis == "channel":
        step = max(1, step // group_size) * group_size
    for start in range(0, n, step):
        part = slice(start, min(start + step, n))
        groups = part if axis == "token" else slice(part.start // group_size, part.stop // group_size)
        _quantize(x[:, :, part], out.codes[:, :, part], out.scale[:, :, groups], out.zero[:, :, groups], bits, axis, group_size)
    return out


def _quantize(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bits: int, axis: str, group_size: int) -> None:
    top = 2**bits - 1
    x, dim = (x.unflatten(2, (-1, group_size)), 3) if axis == "channel" else (x.unflatten(3, (-1, group_size)), 4)
    low, high = x.amin(dim).float(), x.amax(dim).float()
    largest = torch.finfo(scale.dtype).max
    zero.copy_(low.clamp(-largest, largest))
    scale.copy_(high.sub_(low).div_(top).clamp_(max=largest))
    divisor = scale.float().masked_fill(scale == 0, torch.inf)
    code = torch.sub(x, zero.float().unsqueeze(dim)).div_(divisor.unsqueeze(dim)).round_().clamp_(0, top).to(torch.uint8)
    code = code.flatten(2, 3) if axis == "channel" else code.flatten(3, 4)
    first, *others = code.chunk(8 // bits, dim=-1)
    codes.copy_(first)
    for i, plane in enumerate(others, start=1):
        codes |= plane.bitwise_left_shift_(i * bits)


def destination(x: Tensor, bits: int, axis: str, group_size: int, scale_dtype: torch.dtype, out: Codes | None) -> Codes:
    """Check the arguments of a quantization; the codes it shall write, new ones unless ``out`` is given."""
    if x.ndim != 4 or x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, must be float32, float16 or bfloat16 [B, H, N, D]")
    if bits not in BITS:
        raise ValueError(f"bits={bits} must be one of {BITS}")
    if axis not in ("channel", "token"):
        raise ValueError(f"axis={axis!r} must be 'channel' or 'token'")
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype={scale_dtype} must be float16 or float32")
    b, h, n, d = x.shape
    if d * bits % 8:
        raise ValueError(f"head dim {d} cannot be packed at {bits} bits: it must be a multiple of {8 // bits}")
    size, what = (n, "tokens") if axis == "channel" else (d, "head dim")
    if group_size < 1 or size % group_size:
        raise ValueError(f"group_size={group_size} must be at least 1 and divide the {what}, {size}")
    shape = (b, h, n, d * bits // 8)
    scale_shape = (b, h, n // group_size, d) if axis == "channel" else (b, h, n, d // group_size)
    if out is None:
        codes = torch.empty(shape, dtype=torch.uint8, device=x.device)
        scale, zero = (torch.empty(scale_shape, dtype=scale_dtype, device=x.device) for _ in range(2))
        return Codes(codes, scale, zero, bits, axis, group_size)
    if out.zero is None or out.format != "int":
        raise ValueError(f"out has format={out.format!r} and zero={out.zero}, must be 'int' with zero points")
    given = (out.bits, out.axis, out.group_size, tuple(out.codes.shape), tuple(out.scale.shape), tuple(out.zero.shape))
    wanted = (bits, axis, group_size, shape, scale_shape, scale_shape)
    if given != wanted:
        raise ValueError(f"out has (bits, axis, group_size, codes, scale, zero) = {given}, must be {wanted}")
    if out.codes.dtype != torch.uint8 or out.scale.dtype != scale_dtype or out.zero.dtype != scale_dtype:
        raise ValueError(f"out is {out.codes.dtype}, {out.scale.dtype}, {out.zero.dtype}, must be uint8 and {scale_dtype}")
    return out
