"""Parking: many conversations with one model under a limit of bytes; who was not needed for longest waits in a file."""

from __future__ import annotations

import tempfile
import threading
import urllib.parse
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvlab.cache import KVCache, resume
from kvlab.keep.base import parse_bytes
from kvlab.strategy import Strategy

ENDING = ".kvcache"


class Parking:
    """Conversations by name. ``limit``: bytes that caches may take on the compute device together, as a number or as text ("200 MB").

    ``folder``: where parked ones lie. One that is given stays, and what was parked there before is found again: all of it after ``close()``; after a
    crash each conversation as it was when it was last parked. Otherwise it is a private one that goes with this object. A conversation is only
    ever parked between two uses; files are written whole or not at all.

    Raises ``ValueError`` for a limit that is no number of bytes or under 1, ``OSError`` for a folder that cannot be written.
    """

    def __init__(self, model: Any, limit: int | str, folder: str | Path | None = None) -> None:
        try:
            self.limit = parse_bytes(limit) if isinstance(limit, str) else int(limit)
        except (ValueError, TypeError, OverflowError):
            self.limit = 0
        if self.limit < 1 or isinstance(limit, bool):
            raise ValueError(f"Parking: limit={limit!r} is no number of bytes (allowed: 1 or more, or text such as '200 MB')")
        self.model = model
        self._private = tempfile.TemporaryDirectory(prefix="kvlab-parking-") if folder is None else None
        self.folder = Path(folder if self._private is None else self._private.name).absolute()  # type: ignore[arg-type]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._here: OrderedDict[str, KVCache] = OrderedDict()  # least recently used first
        self._busy: set[str] = set()
        self._lock = threading.RLock()
        if self._private is not None:
            self._gone = weakref.finalize(self, self._private.cleanup)

    def new(self, name: str, strategy: Strategy | None = None) -> None:
        """Begin a conversation. Raises ``ValueError`` if there is one of this name, or for a name that makes no file name."""
        with self._lock:
            if name in self:
                raise ValueError(
                    f"Parking: there is a conversation {name!r} already (allowed: another name, or remove() it first)"
                )
            self._path(name)
            self._here[name] = KVCache(self.model, strategy)

    @contextmanager
    def use(self, name: str) -> Iterator[KVCache]:
        """``with parking.use(name) as cache:`` has the conversation on the device, and keeps it there meanwhile.

        Before and afterwards others are parked, the least recently used first, until all fit; one that alone is larger than the limit is parked
        after its use. Raises ``KeyError`` for an unknown name, ``RuntimeError`` if it is in use already.
        """
        with self._lock:
            if name in self._busy:
                raise RuntimeError(f"Parking: {name!r} is in use already (allowed: one at a time)")
            if name not in self:
                raise KeyError(f"Parking: no conversation {name!r} (there are: {', '.join(map(repr, self.names)) or 'none'})")
            self._busy.add(name)
            try:
                if name not in self._here:
                    path = self._path(name)
                    self._fit(path.stat().st_size)
                    self._here[name] = resume(self.model, path)
                cache = self._here[name]
                self._here.move_to_end(name)
            except BaseException:
                self._busy.discard(name)
                raise
        try:
            yield cache
        except BaseException:
            with self._lock, suppress(OSError):  # what went wrong in the use is what is to be heard
                self._used(name)
            raise
        with self._lock:
            self._used(name)

    def _used(self, name: str) -> None:
        self._busy.discard(name)
        cache = self._here.get(name)
        if cache is not None and cache.parked is not None:  # its user has put it somewhere else
            del self._here[name]
        self._fit()

    def _fit(self, more: int = 0) -> None:
        for name in list(self._here):
            if self.resident + more <= self.limit:
                return
            if name not in self._busy:
                with suppress(RuntimeError):  # one that failed half-way cannot be parked; it says so when it is used
                    self.park(name)

    def park(self, name: str) -> None:
        """Put one away now. Raises ``KeyError`` for one that is not on the device, ``RuntimeError`` for one in use; if it fails it stays as it is."""
        with self._lock:
            if name in self._busy:
                raise RuntimeError(f"Parking: {name!r} is in use (allowed: after its use)")
            if name not in self._here:
                raise KeyError(
                    f"Parking: {name!r} is not on the device (there are: {', '.join(map(repr, self._here)) or 'none'})"
                )
            self._here[name].park(self._path(name))
            del self._here[name]

    def remove(self, name: str) -> None:
        """Forget a conversation, its file too. Raises ``KeyError`` for an unknown name, ``RuntimeError`` for one in use."""
        with self._lock:
            if name in self._busy:
                raise RuntimeError(f"Parking: {name!r} is in use (allowed: after its use)")
            if name not in self:
                raise KeyError(f"Parking: no conversation {name!r}")
            cache = self._here.pop(name, None)
            if cache is not None:
                cache.close()
            self._path(name).unlink(missing_ok=True)

    @property
    def resident(self) -> int:
        """Bytes of all caches on the compute device."""
        return sum(cache.resident for cache in self._here.values())

    @property
    def names(self) -> list[str]:
        """All conversations, the parked ones first."""
        return [*self.parked, *self._here]

    @property
    def parked(self) -> list[str]:
        found = (urllib.parse.unquote(path.name.removesuffix(ENDING)) for path in sorted(self.folder.glob(f"*{ENDING}")))
        return [name for name in found if name not in self._here]

    def __contains__(self, name: str) -> bool:
        return name in self._here or self._path(name).is_file()

    def __len__(self) -> int:
        return len(self.names)

    def _path(self, name: str) -> Path:
        file = urllib.parse.quote(name, safe=" ") + ENDING if isinstance(name, str) else ""
        if not isinstance(name, str) or not name or len(file) > 200:
            raise ValueError(f"Parking: name={name!r} makes no file name (allowed: text of 1 to about 60 characters)")
        return self.folder / file

    def close(self) -> None:
        """Give back all memory. Into a folder that was given, what is on the device is parked first; a private one goes with everything in it."""
        with self._lock:
            if self._private is None:
                for name in list(self._here):
                    with suppress(RuntimeError):
                        self.park(name)
            for cache in self._here.values():
                cache.close()
            self._here.clear()
            if self._private is not None:
                self._gone()

    def __repr__(self) -> str:
        return f"Parking({len(self._here)} on the device, {len(self.parked)} parked, {self.resident:,} of {self.limit:,} bytes)"
