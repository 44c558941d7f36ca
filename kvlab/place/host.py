"""Host: rows wait in CPU memory beside a GPU, pinned so that copies run beside computing; both directions on one side stream."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.buffer import Buffer, gather
from kvlab.place.tier import Tier
from kvlab.timeline import Mark


@dataclass(frozen=True)
class Ticket:
    data: Tensor
    done: torch.cuda.Event


class HostTier(Tier):
    """One stream carries both ways in order, so rows are never read back before they have left completely."""

    name = "cpu"

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        super().__init__(device)
        self.pin = pin
        self._stream = torch.cuda.Stream(device)
        self._held: weakref.WeakKeyDictionary[Buffer, Tensor] = weakref.WeakKeyDictionary()

    def put(self, buffer: Buffer, stop: int, page: int, layer: int) -> None:
        data, host = buffer.data, self._held.get(buffer)
        assert data is not None
        first = min(buffer.clean, stop)
        if host is None or host.shape[:2] != data.shape[:2] or host.shape[3:] != data.shape[3:] or host.dtype != data.dtype:
            host, first = None, 0
        if host is None or host.shape[2] < stop:
            with torch.inference_mode(False):
                wide = torch.empty(
                    (*data.shape[:2], stop + stop // 4 + page, *data.shape[3:]), dtype=data.dtype, pin_memory=self.pin
                )
            if host is not None and first:
                self._stream.synchronize()  # what is on its way out must be in before it is copied on
                wide[:, :, :first] = host[:, :, :first]
            host = self._held[buffer] = wide
        if stop <= first:
            return
        here = first - buffer.first - buffer.away if buffer.away else first
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            start = self._mark()
            rows = data[:, :, here : here + stop - first]
            host[:, :, first:stop].copy_(rows, non_blocking=True)
            data.record_stream(self._stream)
            self._note("write", layer, start, rows.nbytes)

    def forget(self, buffer: Buffer) -> None:
        if self._held.pop(buffer, None) is not None:
            buffer.touch()

    def start(self, buffer: Buffer, layer: int) -> Ticket:
        host, near = self._held[buffer], buffer.data
        assert near is not None
        first, stop = buffer.first, buffer.first + buffer.away
        with torch.inference_mode(False), torch.cuda.stream(self._stream):
            start = self._mark()
            data = torch.empty(self.room(buffer), dtype=near.dtype, device=self.device)
            data[:, :, first:stop].copy_(host[:, :, first:stop], non_blocking=True)
            self._note("fetch", layer, start, buffer.away * buffer.row_bytes)
            return Ticket(data, self._stream.record_event())

    def finish(self, ticket: Ticket) -> Tensor:
        current = torch.cuda.current_stream(self.device)
        current.wait_event(ticket.done)
        ticket.data.record_stream(current)
        return ticket.data

    def take(self, buffer: Buffer, index: Tensor) -> Tensor:
        self._stream.synchronize()  # rows may still be on their way out
        host = self._held[buffer]
        start = self._mark()
        rows = gather(host, index.clamp(min=0).cpu())
        with torch.inference_mode(False):
            out = rows.to(self.device)
        layer = -1 if self.timeline is None else self.timeline.layer
        self._note("fetch", layer, start, rows.nbytes)
        self._note("stall", layer, start, 0)
        return out

    def bytes(self, buffer: Buffer) -> int:
        host = self._held.get(buffer)
        return 0 if host is None else host.nbytes

    def close(self) -> None:
        self._stream.synchronize()
        self._held.clear()

    def _mark(self) -> Mark | None:
        return None if self.timeline is None else self.timeline.mark()

    def _note(self, kind: str, layer: int, start: Mark | None, count: int) -> None:
        if self.timeline is not None and start is not None:
            self.timeline.note(kind, layer, start, self.timeline.mark(), count)
