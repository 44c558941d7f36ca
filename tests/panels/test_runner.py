"""The runner behind a panel: the newest task wins, errors arrive, cancelling works, and two panels take turns."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvlab.errors import Cancelled
from kvlab.panels.runner import WORK, Runner, Ticket

LONG = 20.0  # seconds: a test that needs them has failed


@pytest.fixture
def ends() -> list[BaseException | None]:
    return []


@pytest.fixture
def runner(ends: list[BaseException | None]) -> Iterator[Runner]:
    made = Runner(ends.append, settle=0.02)
    yield made
    made.cancel()
    assert made.wait(LONG)


def steps(ticket: Ticket, count: int = 1000) -> None:
    """A task that looks at its ticket between short steps."""
    for _ in range(count):
        ticket.check()
        time.sleep(0.005)


def test_a_fast_drag_runs_the_last_value(runner: Runner, ends: list[BaseException | None]) -> None:
    shown: list[int] = []

    def task(ticket: Ticket, value: int) -> None:
        steps(ticket, 4)
        ticket.show(shown.append, value)

    for value in range(50):
        runner.submit(lambda ticket, value=value: task(ticket, value))
        time.sleep(0.002)
    assert runner.wait(LONG)
    assert shown[-1] == 49
    assert runner.started <= 3
    assert ends[-1] is None


def test_a_newer_task_ends_a_running_one(runner: Runner, ends: list[BaseException | None]) -> None:
    begun, shown = threading.Event(), []

    def old(ticket: Ticket) -> None:
        begun.set()
        steps(ticket)
        shown.append("old")

    runner.submit(old)
    assert begun.wait(LONG)
    runner.submit(lambda ticket: ticket.show(shown.append, "new"))
    assert runner.wait(LONG)
    assert shown == ["new"]
    assert ends == [None]  # the replaced task says nothing


def test_an_outdated_task_that_never_looks_still_shows_nothing(runner: Runner) -> None:
    begun, go_on, shown = threading.Event(), threading.Event(), []

    def deaf(ticket: Ticket) -> None:
        begun.set()
        go_on.wait(LONG)
        ticket.show(shown.append, "outdated")

    runner.submit(deaf)
    assert begun.wait(LONG)
    runner.submit(lambda ticket: ticket.show(shown.append, "new"))
    go_on.set()
    assert runner.wait(LONG)
    assert shown == ["new"]


def test_an_error_arrives_and_the_next_task_runs(runner: Runner, ends: list[BaseException | None]) -> None:
    def broken(_: Ticket) -> None:
        raise ValueError("bits=5")

    runner.submit(broken)
    assert runner.wait(LONG)
    assert isinstance(ends[-1], ValueError)
    assert not WORK.locked()
    runner.submit(lambda ticket: None)
    assert runner.wait(LONG)
    assert ends[-1] is None


def test_cancel_while_running_and_while_waiting(runner: Runner, ends: list[BaseException | None]) -> None:
    begun = threading.Event()

    def task(ticket: Ticket) -> None:
        begun.set()
        steps(ticket)

    runner.submit(task)
    assert begun.wait(LONG)
    assert runner.busy
    runner.cancel()
    assert runner.wait(LONG)
    assert isinstance(ends[-1], Cancelled)
    begun.clear()
    runner.submit(task)
    runner.cancel()
    assert runner.wait(LONG)
    assert not begun.is_set()
    assert len(ends) == 2


def test_two_panels_take_turns() -> None:
    inside, most, log = [], [], []

    def task(ticket: Ticket, name: str) -> None:
        inside.append(name)
        most.append(len(inside))
        steps(ticket, 10)
        inside.remove(name)
        ticket.show(log.append, name)

    runners = {name: Runner(lambda _: None, settle=0.0) for name in "ab"}
    for name, runner in runners.items():
        runner.submit(lambda ticket, name=name: task(ticket, name))
    assert all(runner.wait(LONG) for runner in runners.values())
    assert max(most) == 1
    assert sorted(log) == ["a", "b"]


def test_a_task_can_be_cancelled_while_another_panel_works() -> None:
    ends: list[BaseException | None] = []
    runner = Runner(ends.append, settle=0.0)
    with WORK:
        runner.submit(lambda ticket: None)
        time.sleep(0.05)
        runner.cancel()
        assert runner.wait(LONG)
    assert isinstance(ends[0], Cancelled)
    assert runner.started == 0


def test_light_tasks_do_not_wait_for_heavy_ones() -> None:
    runner, shown = Runner(lambda _: None, settle=0.0, heavy=False), []
    with WORK:
        runner.submit(lambda ticket: ticket.show(shown.append, "light"))
        assert runner.wait(LONG)
    assert shown == ["light"]
