"""Work in the background of a panel: the newest task wins, one task at a time in the whole process, and nothing is lost silently.

A dragged slider submits a task for each value. The runner waits until the values have settled, does the last one, and takes a
running task down at its next step. What a task shows passes through its ticket, so an outdated task shows nothing.
"""

import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from kvlab import lab
from kvlab.errors import Cancelled

WORK = threading.Lock()
"""Held while a task runs: two at once would share the processor and spoil each other's times."""

_open: weakref.WeakValueDictionary[str, lab.Lab] = weakref.WeakValueDictionary()


def load_model(name: str) -> lab.Lab:
    """`lab.load`, for use in a task; panels share what they have loaded."""
    found = _open.get(name)
    if found is None:
        found = _open[name] = lab.load(name, progress=False)
    return found


class Ticket:
    """A task's right to run and to show. It ends when a newer task is submitted, or by `Runner.cancel`."""

    def __init__(self, lock: threading.RLock) -> None:  # type: ignore[valid-type]
        self._lock = lock
        self.ended = threading.Event()

    def check(self, *_: Any) -> None:
        """Raise `Cancelled` if the ticket has ended. Takes any arguments, so it can stand as a progress callback."""
        if self.ended.is_set():
            raise Cancelled("a newer run, or a person, has ended this one")

    def show(self, draw: Callable[..., Any], *values: Any, **named: Any) -> None:
        """`draw(...)`, unless the ticket has ended: then `Cancelled`. No newer task can begin in between."""
        with self._lock:  # type: ignore[attr-defined]
            self.check()
            draw(*values, **named)


Task = Callable[[Ticket], None]


class Runner:
    """Runs tasks on a thread of its own, which lives only while there is something to do.

    `ended(error)` is called once for each task that has run, with None, `Cancelled` or what went wrong, under `lock`; it is not
    called for a task that a newer one has replaced. `settle`: seconds without a newer task before one begins. `heavy=False`:
    tasks so short that they need not wait for their turn. `lock`: another runner's, where both draw on the same panel.
    """

    def __init__(
        self,
        ended: Callable[[BaseException | None], None],
        *,
        settle: float = 0.12,
        heavy: bool = True,
        lock: "threading.RLock | None" = None,  # type: ignore[valid-type]
    ) -> None:
        self.lock = lock or threading.RLock()
        self.started = 0  # tasks that have begun
        self._turn = WORK if heavy else threading.Lock()
        self._ended, self._settle = ended, settle
        self._waiting: tuple[Task, Ticket, float] | None = None
        self._ticket: Ticket | None = None
        self._idle = threading.Event()
        self._idle.set()

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def submit(self, task: Task, after: float | None = None) -> Ticket:
        """Do `task(ticket)` soon (``after`` seconds; None: as soon as it has settled), instead of whatever is waiting or running."""
        with self.lock:
            if self._ticket is not None:
                self._ticket.ended.set()
            ticket = self._ticket = Ticket(self.lock)
            self._waiting = (task, ticket, time.monotonic() + (self._settle if after is None else after))
            if self._idle.is_set():
                self._idle.clear()
                threading.Thread(target=self._work, name="kvlab panel", daemon=True).start()
            return ticket

    def cancel(self) -> None:
        """End the running task at its next step, and forget the waiting one."""
        with self.lock:
            if self._ticket is not None:
                self._ticket.ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Until nothing runs or waits -> True, or False after `timeout` seconds. Not from within a task."""
        return self._idle.wait(timeout)

    def _work(self) -> None:
        while (ready := self._next()) is not None:
            task, ticket = ready
            error: BaseException | None = None
            try:
                self._take_turn(ticket)
                try:
                    ticket.check()
                    self.started += 1
                    task(ticket)
                finally:
                    self._turn.release()
            except BaseException as problem:
                error = problem
            with self.lock:
                if ticket is self._ticket:
                    try:
                        self._ended(error)
                    except Exception:  # a fault in the panel itself must not leave it busy for ever
                        traceback.print_exc()

    def _next(self) -> tuple[Task, Ticket] | None:
        """The newest task once it has settled; None, and idle, when there is none."""
        while True:
            with self.lock:
                if self._waiting is None:
                    self._idle.set()
                    return None
                task, ticket, begin = self._waiting
                left = begin - time.monotonic()
                if left <= 0 or ticket.ended.is_set():
                    self._waiting = None
                    return task, ticket
            ticket.ended.wait(left)

    def _take_turn(self, ticket: Ticket) -> None:
        while not self._turn.acquire(timeout=0.05):
            ticket.check()
