"""What a Triton kernel reads, program by program, as the interpreter runs it; and what was recorded on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from kvlab import _data, geometry

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Reads:
    """Of one tensor's storage. ``programs``: the programs that read it, in the order in which they ran. ``counts``: how often each byte was read by each,
    int ``[programs, bytes]``. ``row``: bytes of the tensor's last dim.
    """

    programs: tuple[tuple[int, int, int], ...]
    counts: Array
    row: int

    def rows(self) -> Array:
        """Which program reads each byte, as a picture ``[rows, row]``: its number, -1 where none does, -2 where several do."""
        if not self.programs:
            return np.full((self.counts.shape[1] // self.row, self.row), -1)
        some = self.counts > 0
        several = some.sum(0)
        which = np.where(several == 1, some.argmax(0), np.where(several == 0, -1, -2))
        return which.reshape(-1, self.row)


def reads(call: Callable[[], object], tensor: Tensor) -> Reads:
    """Run ``call`` and note which bytes of ``tensor`` the Triton kernels in it load.

    Raises ``RuntimeError`` unless Triton's interpreter is on (``TRITON_INTERPRET=1`` before triton is first imported), ``ValueError`` for a tensor that
    is not on the CPU.
    """
    import triton
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("reads: Triton's interpreter is off: set TRITON_INTERPRET=1 before triton is first imported")
    if tensor.device.type != "cpu":
        raise ValueError(f"reads: the tensor is on {tensor.device} (allowed: the CPU, where the interpreter runs)")
    builder: Any = interpreter.interpreter_builder
    start, size = tensor.data_ptr(), tensor.nbytes
    found: dict[tuple[int, int, int], Array] = {}
    plain = builder.create_masked_load

    def noted(ptrs: Any, mask: Any, *rest: Any) -> Any:
        item = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        at = ptrs.data.astype(np.int64)[np.broadcast_to(mask.data.astype(bool), ptrs.data.shape)] - start
        at = at[(at >= 0) & (at < size)]
        if at.size:
            x, y, z = map(int, builder.grid_idx)
            counts = found.setdefault((x, y, z), np.zeros(size, np.int64))
            np.add.at(counts, (at[:, None] + np.arange(item)).reshape(-1), 1)
        return plain(ptrs, mask, *rest)

    builder.create_masked_load = noted
    try:
        call()
    finally:
        del builder.create_masked_load  # the class's own is behind it
    counts = np.stack(list(found.values())) if found else np.zeros((0, size), np.int64)
    return Reads(tuple(found), counts, tensor.shape[-1] * tensor.element_size())


def recorded(name: str = "2026-11-29-h200.json") -> dict[str, Any]:
    """What ``make gpu`` wrote on a GPU, from ``data/results/gpu``. Raises ``ValueError`` for a name that is not there, listing those that are."""
    folder = _data.path("results/gpu/README.md").parent
    path = folder / name
    if Path(name).name != name or not path.is_file():
        there = ", ".join(sorted(file.name for file in folder.glob("*.json")))
        raise ValueError(f"name={name!r} is not one of {there or 'none: nothing was measured on a GPU yet'}")
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Place:
    """Where a timed kernel stands on the roofline. ``intensity``: products and additions a byte of cache read; ``speed``: of them a second."""

    name: str
    model: str
    batch: int
    context: int
    intensity: float
    speed: float

    def share(self, bandwidth: float, peak: float) -> float:
        """Its speed against what ``bandwidth`` (bytes a second) and ``peak`` (products a second) allow at its intensity."""
        return self.speed / min(peak, self.intensity * bandwidth)


def places(run: dict[str, Any], names: tuple[str, ...] = ("dense", "int8", "int4", "int2", "sdpa flash")) -> list[Place]:
    """The roofline's points (Williams, Waterman and Patterson 2009) of what :func:`recorded` holds: decode attention, head dim 128, one query a row.

    Two products with ``context`` keys and values of 128 numbers for each query head. Rows that failed are left out.
    """
    found = []
    for row in run["benchmark"]:
        if row["name"] in names and "ms" in row:
            products = 4 * row["batch"] * geometry.find(row["model"]).query_heads * row["context"] * 128
            found.append(
                Place(
                    row["name"],
                    row["model"],
                    row["batch"],
                    row["context"],
                    products / row["bytes"],
                    products / (row["ms"] * 1e-3),
                )
            )
    return found
