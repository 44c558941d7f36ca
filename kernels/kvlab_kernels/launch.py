"""How kernels are launched: a small table per architecture, the number of splits, and an optional cached search.

Nothing here imports triton until :func:`require_triton` is called, so the package can be imported without it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

WORK_PER_SPLIT = 256  # tokens: below this a split costs more than it brings
MAX_SPLITS = 256
OVERHEAD = 128  # tokens
GRID = 65_535  # programs along the second and third axis of a grid


@dataclass(frozen=True)
class Settings:
    """Launch settings of the split kernel.

    ``block_n``: tokens a tile. ``num_warps``, ``num_stages``: as in Triton; ``num_stages - 1`` tiles are in flight.
    ``programs_per_sm``: how many programs the grid should hold for each multiprocessor; the number of splits follows from it.
    ``maxnreg``: a cap on registers a thread, or None.
    """

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 8
    maxnreg: int | None = None

    def check(self) -> None:
        """Raise ValueError for what no kernel can be launched with."""
        for name, value, low, high in (("block_n", self.block_n, 16, 256), ("num_warps", self.num_warps, 1, 32)):
            if not isinstance(value, int) or not low <= value <= high or value & (value - 1):
                raise ValueError(f"settings.{name}={value!r} must be a power of two from {low} to {high}")
        for name, number in (("num_stages", self.num_stages), ("programs_per_sm", self.programs_per_sm)):
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"settings.{name}={number!r} must be 1 or more")

    def options(self) -> dict[str, int]:
        """The keyword arguments Triton wants."""
        out = {"num_warps": self.num_warps}
        return out if self.maxnreg is None else {**out, "maxnreg": self.maxnreg}


# (architecture, bits of a stored key) -> settings; 16 stands for a dense cache, 32 for float32 arithmetic.
# Head dim 128 is what they were chosen for; fit() shrinks the tile for larger rows.
TABLE: dict[int, dict[int, Settings]] = {
    8: {
        32: Settings(16, 4, 2, 4),
        16: Settings(64, 4, 2, 3),
        8: Settings(64, 2, 3, 4),
        4: Settings(32, 1, 3, 8),
        2: Settings(32, 1, 3, 8),
    },
    9: {
        32: Settings(16, 4, 2, 4),
        16: Settings(64, 4, 3, 3),
        8: Settings(64, 1, 3, 6),
        4: Settings(64, 1, 3, 8),
        2: Settings(32, 1, 3, 8),
    },
}
TABLE[10] = TABLE[9]


def require_triton() -> None:
    """Raise a RuntimeError that says what is missing, if triton is."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise RuntimeError("this kernel needs triton, which is not installed; the torch path works without it") from error


def interpreting() -> bool:
    """Whether Triton's interpreter is on (``TRITON_INTERPRET=1``, read when triton is first imported)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def check_device(*tensors: torch.Tensor | None) -> torch.device:
    """The one device of all the tensors, on which a kernel can run.

    Raises ValueError if they are on several devices, or on a CPU without the interpreter.
    """
    devices = {x.device for x in tensors if x is not None}
    if len(devices) != 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")
    device = devices.pop()
    if device.type != "cuda" and not interpreting():
        raise ValueError(
            f"tensors are on {device}: Triton kernels need a GPU, or TRITON_INTERPRET=1 set before triton is imported"
        )
    return device


def on(device: torch.device) -> AbstractContextManager[Any]:
    """``with on(device):`` launches there; Triton launches on whatever device is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """``(major compute capability, multiprocessors)``; the interpreter counts as a Hopper GPU with two multiprocessors,
    and ``meta:90`` is a compute capability without a GPU, to compile for."""
    if device.type == "meta":
        return (device.index or 90) // 10, 132
    if device.type != "cuda":
        return 9, 2
    found = torch.cuda.get_device_properties(device)
    return found.major, found.multi_processor_count


def settings(
    device: torch.device, bits: int, head_dim: int, columns: int, extras: bool = False, lookup: bool = False
) -> Settings:
    """Settings for a cache of ``bits`` (as in ``TABLE``) and queries padded to ``columns``.

    What needs more registers gets more warps or a smaller tile: long rows, many columns, ``extras`` (a bias or a soft-cap),
    and ``lookup`` (scales looked up for each token). Otherwise it would spill; the compile tests hold it.
    """
    major, _ = capability(device)
    found = TABLE[min(max(major, 8), 10)][bits]
    many = columns > 8 or lookup or (extras and bits == 8) or (bits == 2 and head_dim < 128)
    wanted = 4 if many else 2 if extras or head_dim != 128 else 1
    block_n = min(found.block_n, 8192 // head_dim)
    if lookup or (bits <= 16 and head_dim > 128):
        block_n //= 2
    return replace(found, num_warps=max(found.num_warps, wanted), block_n=max(16, 1 << block_n.bit_length() - 1))


@lru_cache(maxsize=4096)
def splits(device: torch.device, heads: int, tokens: int, found: Settings) -> int:
    """Into how many parts to cut the tokens: Flash-Decoding's question, for ``heads`` = batch x KV heads x query blocks.

    The grid runs in waves of ``programs_per_sm`` for each multiprocessor, and every program has a cost of its own, as high as that of
    ``OVERHEAD`` tokens. The cheapest cut is taken: few waves, with few places empty.
    """
    slots = capability(device)[1] * found.programs_per_sm
    most = max(1, min(-(-tokens // max(WORK_PER_SPLIT, found.block_n)), MAX_SPLITS))

    def cost(cut: int) -> float:
        return -(-heads * cut // slots) * (tokens / cut + OVERHEAD)

    return min(range(1, most + 1), key=cost)


_TUNED: dict[str, Settings] = {}


def tuned(key: Hashable) -> Settings | None:
    """What :func:`tune` found for this key, in this process or in the file it keeps."""
    return _TUNED.get(str(key))


def tune(
    key: Hashable, run: Callable[[Settings], object], candidates: Iterable[Settings], path: str | os.PathLike | None = None
) -> Settings:
    """The fastest of ``candidates``; measured once for each ``key`` and, with ``path``, remembered in a JSON file there.

    ``run(settings)`` must launch the kernel. A candidate that does not compile or launch is skipped; RuntimeError if none does.
    """
    file = Path(path) if path is not None else None
    known = json.loads(file.read_text()) if file is not None and file.exists() else {}
    name = str(key)
    if name in known:
        _TUNED[name] = Settings(**known[name])
    if name not in _TUNED:
        from triton.testing import do_bench

        best, errors = None, []
        for candidate in candidates:
            try:
                run(candidate)
                took = do_bench(lambda c=candidate: run(c), warmup=5, rep=30, return_mode="median")
            except Exception as error:  # too many registers, too much shared memory: not a candidate here
                errors.append(f"{candidate}: {error}")
                continue
            if best is None or took < best[0]:
                best = took, candidate
        if best is None:
            raise RuntimeError("no candidate could be launched:\n" + "\n".join(errors))
        _TUNED[name] = best[1]
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({**known, name: asdict(best[1])}, indent=1))
    return _TUNED[name]
