"""Disk: rows wait in files, one a buffer, page after page, each with a checksum; threads read them back beside computing."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.buffer import Buffer
from kvlab.place.tier import NotWritten, Tier
from kvlab.timeline import Timeline

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PREFIX = "kvlab-offload-"
LOCK = "lock"  # held by the process that a folder belongs to
YOUNG = 60  # seconds in which a folder without a lock is left alone
READERS = 2  # keys and values of a layer come back side by side
SECTOR = 4096  # what reads past the system's cache are aligned to
PIECE = 4 << 20  # bytes read or written at a time
_local = threading.local()


@dataclass
class File:
    """One buffer's pages: page ``p`` holds rows ``p * page`` to ``(p + 1) * page`` of every head, head after head. ``sums``: uint64 ``[pages, heads]``."""

    path: Path
    page: int
    heads: int
    row: int  # bytes of one head's row
    sums: np.ndarray[Any, np.dtype[np.uint64]] = field(repr=False)

    @property
    def chunk(self) -> int:
        """Bytes of one head's rows in one page."""
        return self.page * self.row

    @property
    def stride(self) -> int:
        return self.heads * self.chunk


class Link:
    """An emulated link: what is read counts as there no sooner than a link of ``speed`` bytes a second would have brought it. 0: as fast as it comes."""

    def __init__(self, speed: float) -> None:
        self.speed, self._free, self._lock = speed, 0.0, threading.Lock()

    def wait(self, count: int, start: float) -> None:
        if not self.speed:
            return
        with self._lock:
            self._free = max(self._free, start) + count / self.speed
            until = self._free
        time.sleep(max(0.0, until - time.perf_counter()))


@dataclass(frozen=True)
class Ticket:
    data: Tensor
    done: Future[None]


class DiskTier(Tier):
    """A private folder that goes with the cache, or at the next start after a crash."""

    name = "disk"

    def __init__(self, device: torch.device, folder: str, *, direct: bool = False, speed: float = 0.0) -> None:
        super().__init__(device)
        parent = Path(folder or tempfile.gettempdir()).absolute()
        sweep(parent)
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        except OSError as error:
            raise OSError(f"Offload: cannot write in the folder {str(parent)!r}: {error.strerror or error}") from error
        self._owner = os.getpid()
        self._remove = weakref.finalize(self, _remove, self.folder, self._owner, _lock(self.folder / LOCK))
        if direct:
            self._try_direct(parent)
        self.direct, self.link = direct, Link(speed)
        self._files: weakref.WeakKeyDictionary[Buffer, File] = weakref.WeakKeyDictionary()
        self._count = 0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kvlab-read")

    def _try_direct(self, parent: Path) -> None:
        probe = self.folder / "probe"
        try:
            probe.write_bytes(bytes(SECTOR))
            read(probe, 0, SECTOR, True)
        except (OSError, AttributeError) as error:
            self._remove()
            raise OSError(
                f"Offload: direct=True: the file system of {str(parent)!r} does not read past the system's cache ({error})"
            ) from error
        finally:
            probe.unlink(missing_ok=True)

    def _mine(self) -> None:
        if not self._remove.alive:
            raise RuntimeError("Offload: this cache is closed: reset() it to use it again")
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"Offload: this cache belongs to process {self._owner}, not to its fork {os.getpid()}; make one for each process"
            )

    # writing

    def put(self, buffer: Buffer, stop: int, page: int, layer: int) -> None:
        self._mine()
        data = buffer.data
        assert data is not None
        heads, row = data.shape[0] * data.shape[1], data.element_size() * math.prod(data.shape[3:])
        file = self._files.get(buffer)
        if file is None or (file.page, file.heads, file.row) != (page, heads, row):
            self.forget(buffer)  # of another shape
            file = File(self.folder / str(self._count), page, heads, row, np.zeros((0, heads), np.uint64))
            self._count, self._files[buffer] = self._count + 1, file
            buffer.touch()
        first = min(buffer.clean, stop) // page
        count = stop // page - first
        back = stop // page < len(file.sums)  # tokens were taken back
        if count <= 0 and not back:
            return
        count = max(count, 0)
        began = time.perf_counter()
        here = first * page - buffer.first - buffer.away if buffer.away else first * page
        rows = data[:, :, here : here + count * page].detach().cpu().contiguous()
        pages = _bytes(rows).reshape(heads, count, file.chunk).transpose(1, 0, 2)
        sums = np.empty((count, heads), np.uint64)
        step = max(1, PIECE // file.stride)
        try:
            handle = os.open(file.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if back:
                    os.ftruncate(handle, stop // page * file.stride)
                for begin in range(0, count, step):
                    piece = np.ascontiguousarray(pages[begin : begin + step])
                    sums[begin : begin + step] = checksum(piece)
                    _write(handle, piece, (first + begin) * file.stride)
            finally:
                os.close(handle)
        except OSError as error:
            buffer.touch(first * page)  # whatever was half-written is written again
            raise NotWritten(
                f"Offload: cannot write {count * file.stride} bytes to {str(self.folder)!r} ({error.strerror or error}). Nothing is lost: the tokens "
                "stay in memory, and the same step can be taken once there is room."
            ) from error
        file.sums = np.concatenate([file.sums[:first], sums])
        if self.timeline is not None and count:
            self.timeline.note("write", layer, began, time.perf_counter(), count * file.stride)

    def forget(self, buffer: Buffer) -> None:
        file = self._files.pop(buffer, None)
        if file is not None:
            buffer.touch()
            file.path.unlink(missing_ok=True)

    # reading

    def start(self, buffer: Buffer, layer: int) -> Ticket:
        self._mine()
        file, near = self._files[buffer], buffer.data
        assert near is not None
        with torch.inference_mode(False):
            data = torch.empty(self.room(buffer), dtype=near.dtype, pin_memory=self.device.type == "cuda")
        into = _bytes(data).reshape(file.heads, -1, file.row)
        pages = range(buffer.first // file.page, (buffer.first + buffer.away) // file.page)
        step = 0 if self.timeline is None else self.timeline.step
        job = (file.path, file, file.sums, pages, into, self.direct, self.link, self.timeline, layer, step)
        return Ticket(data, self._readers.submit(_fetch, *job))

    def finish(self, ticket: Ticket) -> Tensor:
        try:
            ticket.done.result()
        except OSError as error:
            raise self._lost(error) from error
        return ticket.data.to(self.device, non_blocking=True)

    def take(self, buffer: Buffer, index: Tensor) -> Tensor:
        self._mine()
        file, near = self._files[buffer], buffer.data
        assert near is not None
        began = time.perf_counter()
        b, h, m = index.shape
        shared = near.shape[:2] == (1, 1) and (b, h) != (1, 1)
        rows = index.cpu().numpy().reshape(b * h, m)
        heads = np.zeros((b * h, 1), np.int64) if shared else np.arange(b * h)[:, None]
        chunk = np.where(rows >= 0, rows // file.page * file.heads + heads, -1)
        wanted, at = np.unique(chunk, return_inverse=True)
        none = int(len(wanted) > 0 and wanted[0] < 0)
        try:
            chunks = _chunks(file, wanted[none:], self.direct)
        except OSError as error:
            raise self._lost(error) from error
        moved = chunks.size
        self.link.wait(moved, began)
        if self.timeline is not None:
            now = time.perf_counter()
            layer = self.timeline.layer
            self.timeline.note("fetch", layer, began, now, moved)
            self.timeline.note("stall", layer, began, now)
        if not len(chunks):
            return torch.zeros((b, h, m, *near.shape[3:]), dtype=near.dtype, device=self.device)
        at = (at.reshape(b * h, m) - none).clip(0)
        picked = chunks.reshape(len(chunks), file.page, file.row)[at, rows.clip(0) % file.page]
        with torch.inference_mode(False):
            out = torch.from_numpy(picked).view(near.dtype).view(b, h, m, *near.shape[3:])
            return out.to(self.device)

    def _lost(self, error: OSError) -> OSError:
        return OSError(
            f"Offload: rows cannot be read back from {str(self.folder)!r} ({error.strerror or error}): they are lost. reset() the cache and read "
            "the text again."
        )

    def bytes(self, buffer: Buffer) -> int:
        file = self._files.get(buffer)
        return len(file.sums) * file.stride if file is not None else 0

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._remove()


def checksum(chunks: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """uint64 ``[...]`` of bytes ``[..., n]``, n a multiple of 8: words summed up in columns, each column times an odd number of its own.

    Finds every single word that changed, at the speed of memory; it is no protection against someone who means it.
    """
    words = chunks.view(np.uint64)
    count = words.shape[-1]
    width = math.gcd(count, 32)
    columns = words.reshape(*words.shape[:-1], count // width, width).sum(-2, dtype=np.uint64)
    return (columns * _ODD[:width]).sum(-1, dtype=np.uint64)


_ODD = (np.random.default_rng(0).integers(0, 1 << 63, 32, dtype=np.uint64) << np.uint64(1)) | np.uint64(1)


def read(path: Path, offset: int, count: int, direct: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``count`` bytes of a file from ``offset`` on, in memory that the next call of this thread uses again.

    Raises ``OSError`` where the file is shorter.
    """
    begin = offset // SECTOR * SECTOR if direct else offset
    size = -(-(offset + count - begin) // SECTOR) * SECTOR if direct else count
    space = getattr(_local, "space", None)
    if space is None or len(space) < size:
        space = _local.space = mmap.mmap(-1, max(size, PIECE + 2 * SECTOR))
    view, got = memoryview(space)[:size], 0
    handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        while got < offset + count - begin:
            more = os.preadv(handle, [view[got:]], begin + got)
            if not more:
                raise OSError(f"{path.name} is {begin + got} bytes long, {offset + count} were written")
            got += more
    finally:
        os.close(handle)
    return np.frombuffer(space, np.uint8, count, offset - begin)


def _fetch(
    path: Path,
    file: File,
    sums: np.ndarray[Any, Any],
    pages: range,
    into: np.ndarray[Any, Any],
    direct: bool,
    link: Link,
    timeline: Timeline | None,
    layer: int,
    step: int,
) -> None:
    """Read pages to their places in ``into`` ``[heads, rows, bytes]``. In a reader's thread."""
    began = time.perf_counter()
    at_once = max(1, PIECE // file.stride)
    for begin in range(pages.start, pages.stop, at_once):
        end = min(begin + at_once, pages.stop)
        raw = read(path, begin * file.stride, (end - begin) * file.stride, direct).reshape(end - begin, file.heads, file.chunk)
        _compare(path, checksum(raw), sums[begin:end])
        rows = into[:, begin * file.page : end * file.page]
        rows.reshape(file.heads, end - begin, file.chunk)[:] = raw.transpose(1, 0, 2)
    moved = len(pages) * file.stride
    link.wait(moved, began)
    if timeline is not None:
        timeline.note("fetch", layer, began, time.perf_counter(), moved, step)


def _chunks(file: File, wanted: np.ndarray[Any, Any], direct: bool) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The chunks with these ascending numbers (page times heads plus head) -> uint8 ``[chunks, bytes]``."""
    out = np.empty((len(wanted), file.chunk), np.uint8)
    cuts = np.flatnonzero(np.diff(wanted) != 1) + 1
    at_once = max(1, PIECE // file.chunk)
    for run in np.split(np.arange(len(wanted)), cuts):
        for begin in range(0, len(run), at_once):
            part = run[begin : begin + at_once]
            out[part[0] : part[-1] + 1] = read(
                file.path, int(wanted[part[0]]) * file.chunk, len(part) * file.chunk, direct
            ).reshape(-1, file.chunk)
    if len(wanted):
        _compare(file.path, checksum(out), file.sums.reshape(-1)[wanted])
    return out


def _compare(path: Path, found: np.ndarray[Any, Any], written: np.ndarray[Any, Any]) -> None:
    if not np.array_equal(found, written):
        raise OSError(f"{path.name} was changed: its checksum is not the one that was written")


def _bytes(rows: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return rows.view(-1).view(torch.uint8).numpy()


def _write(handle: int, data: np.ndarray[Any, Any], offset: int) -> None:
    view, done = data.data.cast("B"), 0
    while done < len(view):
        done += os.pwrite(handle, view[done:], offset + done)


def _remove(folder: Path, owner: int, lock: int | None) -> None:
    if os.getpid() == owner:  # a fork ends without taking its parent's files along
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(path: Path) -> int | None:
    """Hold a lock that ends with this process, however it ends, and that other containers and hosts see, too."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def sweep(parent: Path) -> None:
    """Remove folders that crashed processes left in ``parent``."""
    for folder in parent.glob(f"{PREFIX}*"):
        if folder.is_dir() and not _alive(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(folder: Path) -> bool:
    """Whether the process that made a folder lives: it holds the lock. Without locks, by its number, which means something on one machine only."""
    if fcntl is not None:
        try:
            handle = os.open(folder / LOCK, os.O_RDWR)
        except FileNotFoundError:
            return time.time() - folder.stat().st_mtime < YOUNG  # it may be about to lock
        except OSError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False
    owner = folder.name.removeprefix(PREFIX).split("-", 1)[0]
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True
