"""Offload: layers leave the compute device between two uses, to CPU RAM or to disk (FlexGen, arXiv 2303.06865)."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.place.base import HasBuffers, Place, PlaceState
from kvlab.strategy import param

PREFIX = "kvlab-offload-"


@dataclass(frozen=True)
class Offload(Place):
    """One layer's cache at a time on the compute device; the others wait in CPU RAM (of a GPU machine) or in files.

    ``to="auto"`` is the CPU's memory where the model runs on a GPU, and disk where it runs on a CPU. On a GPU the next layer's copy
    is under way, on a stream of its own, while this one computes.
    """

    title = "offload"
    paper = "FlexGen, arXiv 2303.06865"

    to: str = param(
        "auto", choices=("auto", "cpu", "disk"), help="Where layers wait. auto: CPU RAM beside a GPU, disk beside a CPU."
    )
    folder: str = param("", help="Where files go when offloading to disk. Empty: the system's folder for temporary files.")

    def state(self, layers: Sequence[HasBuffers], device: torch.device) -> PlaceState:
        to = self.to
        if to == "auto":
            to = "disk" if device.type == "cpu" else "cpu"
        if to == "cpu" and device.type == "cpu":
            raise ValueError(
                "Offload: to='cpu' moves nothing here, the model already runs on the CPU (allowed here: 'disk', 'auto')"
            )
        return DiskState(layers, device, self.folder) if to == "disk" else HostState(layers, device)


class DiskState(PlaceState):
    """Each buffer in a file of its own, in a private folder that goes with the cache, or at the next start after a crash."""

    def __init__(self, layers: Sequence[HasBuffers], device: torch.device, folder: str) -> None:
        super().__init__(layers)
        self.device = device
        parent = Path(folder or tempfile.gettempdir())
        sweep(parent)
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        except OSError as error:
            raise OSError(f"Offload: cannot write in the folder {str(parent)!r}: {error.strerror or error}") from error
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._shape: dict[int, tuple[torch.Size, torch.dtype]] = {}

    def _path(self, layer: int, number: int) -> Path:
        return self.folder / f"{layer}-{number}"

    def fetch(self, layer: int) -> None:
        for number, buffer in enumerate(self.layers[layer].buffers()):
            if buffer.where is None:
                continue
            shape, dtype = self._shape[id(buffer)]
            with torch.inference_mode(False):
                try:
                    raw = torch.from_numpy(np.fromfile(self._path(layer, number), dtype=np.uint8))
                except OSError as error:
                    raise OSError(
                        f"Offload: layer {layer} cannot be read back from {str(self.folder)!r} ({error.strerror or error}): its tokens are lost. "
                        "reset() the cache and read the text again."
                    ) from error
                data = raw.view(dtype).view(shape).to(self.device)
            buffer.arrive(data)

    def release(self, layer: int) -> None:
        buffers = [(n, b) for n, b in enumerate(self.layers[layer].buffers()) if b.data is not None]
        for number, buffer in buffers:  # write all first: if the disk is full, the whole layer is still here
            data = buffer.data
            assert data is not None
            if buffer.dirty:
                path = self._path(layer, number)
                fresh = path.with_suffix(".new")
                try:
                    data.cpu().contiguous().view(-1).view(torch.uint8).numpy().tofile(fresh)
                    os.replace(fresh, path)
                except OSError as error:
                    fresh.unlink(missing_ok=True)
                    raise OSError(
                        f"Offload: cannot write {data.nbytes} bytes to {str(self.folder)!r} ({error.strerror or error}); "
                        "nothing is lost: the layer stays in memory"
                    ) from error
            self._shape[id(buffer)] = (data.shape, data.dtype)
        for _, buffer in buffers:
            buffer.leave("disk")

    def close(self) -> None:
        self._remove()


class HostState(PlaceState):
    """Pinned CPU memory beside a GPU; both directions on one side stream, so a layer is never read back before it is complete."""

    def __init__(self, layers: Sequence[HasBuffers], device: torch.device) -> None:
        super().__init__(layers)
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._host: dict[int, Tensor] = {}
        self._coming: dict[int, list[tuple[Buffer, Tensor]]] = {}
        self._ready: dict[int, torch.cuda.Event] = {}

    def _start(self, layer: int) -> None:
        if layer in self._coming:
            return
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            away = [b for b in self.layers[layer].buffers() if b.where is not None]
            self._coming[layer] = [(b, self._host[id(b)].to(self.device, non_blocking=True)) for b in away]
            self._ready[layer] = self._stream.record_event()

    def fetch(self, layer: int) -> None:
        self._start(layer)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self._ready.pop(layer))
        for buffer, data in self._coming.pop(layer):
            data.record_stream(current)
            buffer.arrive(data)
        if len(self.layers) > 1:
            self._start((layer + 1) % len(self.layers))

    def release(self, layer: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            for buffer in self.layers[layer].buffers():
                data = buffer.data
                if data is None:
                    continue
                if buffer.dirty:
                    host = self._host.get(id(buffer))
                    if host is None or host.shape != data.shape or host.dtype != data.dtype:
                        host = self._host[id(buffer)] = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
                    host.copy_(data, non_blocking=True)
                data.record_stream(self._stream)
                buffer.leave("cpu")

    @property
    def in_flight(self) -> int:
        return sum(data.nbytes for coming in self._coming.values() for _, data in coming)

    def close(self) -> None:
        self._host.clear()
        self._coming.clear()


def sweep(parent: Path) -> None:
    """Remove folders that crashed processes left in ``parent``."""
    for folder in parent.glob(f"{PREFIX}*"):
        owner = folder.name.removeprefix(PREFIX).split("-", 1)[0]
        if owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
