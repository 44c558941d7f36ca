"""What the compute device says of its own memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one GPU, by torch's allocator: ``used`` by tensors now, ``reserved`` from the driver, ``peak`` used since the process began, ``total`` of the
    board. ``retries``: how often an allocation had to free cached blocks first, which says that memory is short or in pieces.
    """

    name: str
    used: int
    reserved: int
    peak: int
    total: int
    retries: int

    @property
    def idle(self) -> int:
        """Reserved, and used by no tensor: fragments, and what was freed lately."""
        return self.reserved - self.used


def device_memory(device: torch.device | str | None = None) -> DeviceMemory | None:
    """Of ``device`` (the current GPU where None); None without a GPU."""
    chosen = torch.device("cuda" if device is None else device)
    if chosen.type != "cuda" or not torch.cuda.is_available():
        return None
    stats = torch.cuda.memory_stats(chosen)
    return DeviceMemory(
        torch.cuda.get_device_name(chosen),
        stats.get("allocated_bytes.all.current", 0),
        stats.get("reserved_bytes.all.current", 0),
        stats.get("allocated_bytes.all.peak", 0),
        torch.cuda.get_device_properties(chosen).total_memory,
        stats.get("num_alloc_retries", 0),
    )
