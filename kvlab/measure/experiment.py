"""Many strategies, many tasks, one row of evidence each: on this machine or many, and taken up again where it was stopped.

rows = experiment(lab, sweep(strategy, {"keep.budget": [128, 256]}), [tasks.PassKeys(), tasks.Text()], out="rows.jsonl")
frame(rows)
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvlab import _data
from kvlab.errors import UnsupportedModel
from kvlab.lab import Lab, load
from kvlab.measure.machine import machine
from kvlab.measure.tasks import Score, Task
from kvlab.measure.tasks import from_dict as task_from_dict
from kvlab.strategy import AXES, Method, Strategy

VERSION = 1  # of what a task means: raised when one changes, so that old rows are not taken for new ones


@dataclass(frozen=True)
class Evidence:
    """One strategy at one task. ``score``: 0 to 1, the task's; ``control``: the full cache's. ``counts``: False where the full cache itself does not reach what
    the task asks for, or the row failed; ``why`` says so. ``ratio``: of a 16-bit dense cache's bytes. ``read_time``, ``write_time``, ``select_time``,
    ``fetch_time``: seconds, see ``measure.phases``; ``seconds``: the whole task, in which a prompt that an earlier row has read does not pass the model again. What there is no number for is None.
    """

    strategy: str
    settings: dict[str, Any]
    task: dict[str, Any]
    model: str
    score: float | None = None
    control: float | None = None
    counts: bool = False
    why: str = ""
    more: dict[str, float] = field(default_factory=dict)
    questions: int = 0
    said: list[list[str]] = field(default_factory=list)
    bytes_allocated: int | None = None
    bytes_logical: int | None = None
    bytes_high_water: int | None = None
    ratio: float | None = None
    effective_bits: float | None = None
    seconds: float | None = None
    read_time: float | None = None
    write_time: float | None = None
    select_time: float | None = None
    fetch_time: float | None = None
    device: str = ""
    dtype: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""
    command: str = ""
    content: str = ""  # of the file that the task reads, if it reads one: its SHA-256
    version: int = VERSION

    @property
    def key(self) -> str:
        """What makes two rows the same measurement."""
        return _key(self.settings, self.task, self.model, self.dtype, self.version, self.content)


def _key(
    settings: Mapping[str, Any], task: Mapping[str, Any], model: str, dtype: str, version: int = VERSION, content: str = ""
) -> str:
    return json.dumps([settings, task, model, dtype, version, content], sort_keys=True)


def _content(task: Task) -> str:
    """SHA-256 of the file that a task reads; "" if it reads none, or it is not there (which the task will say)."""
    name = getattr(task, "file", "")
    return hashlib.sha256(Path(name).read_bytes()).hexdigest() if name and Path(name).is_file() else ""


def sweep(strategy: Strategy, grid: Mapping[str, Sequence[Any]]) -> list[Strategy]:
    """Every combination of settings: ``{"keep.budget": [128, 256], "store.inner.bits": [4, 3], "chunk": [0, 64]}``.

    Combinations that cannot be are left out. Raises ``ValueError`` for a name that the strategy does not have, for no values, or if none is left.
    """
    for name, values in grid.items():
        if not list(values):
            raise ValueError(f"sweep: {name} has no values (allowed: one or more)")
        _get(strategy, name.split("."), name)
    made, refused = [], ""
    for values in itertools.product(*grid.values()):
        one = strategy
        try:
            for name, value in zip(grid, values, strict=True):
                one = _set(one, name.split("."), value)
        except ValueError as error:
            refused = str(error)
            continue
        made.append(one)
    if not made:
        raise ValueError(f"sweep: no combination can be; the last one: {refused}")
    return list(dict.fromkeys(made))


def _get(owner: Any, path: list[str], name: str) -> Any:
    allowed = [*AXES, "chunk"] if isinstance(owner, Strategy) else list(owner.settings()) if isinstance(owner, Method) else []
    if path[0] not in allowed:
        raise ValueError(f"sweep: {name}: {owner} has no setting {path[0]!r} (allowed: {', '.join(allowed) or 'none'})")
    value = getattr(owner, path[0])
    return _get(value, path[1:], name) if len(path) > 1 else value


def _set(owner: Any, path: list[str], value: Any) -> Any:
    inner = _set(getattr(owner, path[0]), path[1:], value) if len(path) > 1 else value
    return dataclasses.replace(owner, **{path[0]: inner})


def experiment(
    lab: Lab,
    strategies: Iterable[Strategy],
    tasks: Iterable[Task],
    *,
    out: str | Path | None = None,
    executor: Executor | None = None,
    progress: bool | Callable[[Evidence], None] = False,
    command: str = "",
) -> list[Evidence]:
    """Every strategy at every task, the full cache first, which is the control -> rows in the order asked for, controls included.

    Args:
        out: a JSON-lines file. Rows that are in it already are not measured again; each new one is written whole or not at all, so it can be killed at any
            time. One process at a time (``RuntimeError``).
        executor: any ``concurrent.futures.Executor``: local processes (``ProcessPoolExecutor``), Dask's ``client.get_executor()``. Its workers load the model by
            ``lab.name`` themselves, so that must be a shipped name, or a folder that they see. None: this process, with this lab.
        progress: True for a bar, or what is called with each row.

    A row that fails says why, and the others go on; it stays in the file (take its line out to try again), unless it was the worker that was lost. Raises ``ValueError`` for no strategy or no task, and for a file that holds something else.
    """
    asked, todo = list(strategies), list(dict.fromkeys(tasks))
    wanted = list(dict.fromkeys([Strategy(), *asked]))
    if not asked:
        raise ValueError("experiment: no strategy is given (allowed: one or more)")
    if not todo:
        raise ValueError("experiment: no task is given (allowed: one or more of kvlab.measure.tasks)")
    dtype = str(next(lab.model.parameters()).dtype).removeprefix("torch.")
    about = {"model": lab.name, "dtype": dtype, "device": str(lab.device), "command": command}
    with contextlib.ExitStack() as stack:
        book = stack.enter_context(_Book(out))
        done: dict[str, Evidence] = dict(book.rows)
        contents = {task: _content(task) for task in todo}

        def key(strategy: Strategy, task: Task) -> str:
            return _key(strategy.to_dict(), task.to_dict(), lab.name, dtype, VERSION, contents[task])

        missing = sum(key(strategy, task) not in done for task in todo for strategy in wanted)
        told = stack.enter_context(_telling(progress, missing))
        for group in (wanted[:1], wanted[1:]):
            jobs = [(strategy, task) for task in todo for strategy in group if key(strategy, task) not in done]
            controls = {task: done.get(key(wanted[0], task)) for task in todo}
            work = [
                (strategy.to_dict(), task.to_dict(), about | {"content": contents[task]}, _score(controls[task]))
                for strategy, task in jobs
            ]
            for made, lost in _measured(lab, work, executor):
                done[made.key] = made
                if not lost:
                    book.write(made)
                told(made)
        return [done[key(strategy, task)] for task in todo for strategy in wanted]


def _score(row: Evidence | None) -> float | None:
    return None if row is None else row.score


def workers(count: int) -> Executor:
    """``count`` processes of this machine as an executor for :func:`experiment`; they share its cores evenly. Raises ``ValueError`` for fewer than 1."""
    if count < 1:
        raise ValueError(f"workers={count} is out of range (allowed: 1 or more)")
    threads = max(1, torch.get_num_threads() // count)
    return ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(threads,)
    )


Work = tuple[dict[str, Any], dict[str, Any], dict[str, str], float | None]


def _measured(lab: Lab, work: list[Work], executor: Executor | None) -> Iterator[tuple[Evidence, bool]]:
    """Rows as they get ready, and whether their worker was lost."""
    if executor is None:
        yield from ((_row(lab, *one), False) for one in work)
        return
    futures: dict[Future[Evidence], Work] = {executor.submit(_elsewhere, one): one for one in work}
    try:
        for future in as_completed(futures):
            try:
                yield future.result(), False
            except Exception as error:  # the worker is gone, or its row did not come through
                settings, task, about, control = futures[future]
                yield _failed(settings, task, about, control, error), True
    finally:
        for future in futures:
            future.cancel()


def _elsewhere(work: Work) -> Evidence:
    """In a worker: its own lab, loaded once."""
    return _row(_lab(work[2]["model"], work[2]["dtype"], work[2]["device"]), *work)


@functools.lru_cache(maxsize=1)
def _lab(name: str, dtype: str, device: str) -> Lab:
    return load(name, dtype=dtype, device=device)


def _row(lab: Lab, settings: dict[str, Any], task: dict[str, Any], about: dict[str, str], control: float | None) -> Evidence:
    strategy, asked = Strategy.from_dict(settings), task_from_dict(task)
    begun = time.perf_counter()
    try:
        with lab.replaying(not asked.timed):
            score = asked.run(lab, strategy)
    except (ValueError, UnsupportedModel, RuntimeError, OSError) as error:
        return _failed(settings, task, about, control, error)
    return _evidence(strategy, asked, about, control, score, time.perf_counter() - begun)


def _failed(
    settings: dict[str, Any], task: dict[str, Any], about: dict[str, str], control: float | None, error: Exception
) -> Evidence:
    why = f"{type(error).__name__}: {error}"
    return Evidence(str(Strategy.from_dict(settings)), settings, task, control=control, why=why, **_stamp(about))


def _stamp(about: dict[str, str]) -> dict[str, Any]:
    return dict(about) | {"machine": machine(), "date": datetime.date.today().isoformat()}


def _evidence(
    strategy: Strategy, task: Task, about: dict[str, str], control: float | None, score: Score, seconds: float
) -> Evidence:
    control = score.value if control is None and strategy == Strategy() else control
    why = ""
    if score.value is None:
        why = "this task has no score"
    elif control is None:
        why = "the full cache's row failed, so there is nothing to compare with"
    elif control < task.least:
        why = f"the full cache itself gets {control:.2f}, below {task.least}: this says nothing about a cache on this model"
    memory = score.memory
    return Evidence(
        strategy=str(strategy),
        settings=strategy.to_dict(),
        task=task.to_dict(),
        score=score.value,
        control=control,
        counts=not why,
        why=why,
        more=score.more,
        questions=len(score.answers),
        said=[[answer.expected, answer.said] for answer in score.answers],
        bytes_allocated=memory.allocated,
        bytes_logical=memory.logical,
        bytes_high_water=memory.high_water,
        ratio=memory.ratio,
        effective_bits=memory.effective_bits,
        seconds=seconds,
        read_time=score.spent.read,
        write_time=score.spent.write,
        select_time=score.spent.select,
        fetch_time=score.spent.fetch,
        **_stamp(about),
    )


@contextlib.contextmanager
def _telling(progress: bool | Callable[[Evidence], None], total: int) -> Iterator[Callable[[Evidence], Any]]:
    """What is called with each new row."""
    if callable(progress) or not progress:
        yield progress if callable(progress) else lambda row: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="row") as bar:

        def told(row: Evidence) -> None:
            bar.set_postfix_str(row.strategy[:40])
            bar.update()

        yield told


class _Book:
    """The file of rows: read when opened, appended to line by line, held by one process."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)
        self.rows: dict[str, Evidence] = {}
        self.file: Any = None

    def __enter__(self) -> _Book:
        if self.path is None:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(self.path, "a+b")
        try:
            _hold(self.file, self.path)
            self._read()
        except BaseException:
            self.file.close()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        if self.file is not None:
            self.file.close()

    def _read(self) -> None:
        self.file.seek(0)
        content = self.file.read()
        whole = content[: content.rfind(b"\n") + 1]
        rows = _parsed(whole.decode("utf-8"), self.path)
        if rest := content[len(whole) :]:  # a process that was killed while it wrote left a piece of a line
            try:
                rows += _parsed(rest.decode("utf-8"), self.path)
            except ValueError:
                begins = b'{"strategy": '
                if not begins.startswith(rest[: len(begins)]):
                    raise ValueError(f"{self.path}: its last line is no row of an experiment; nothing was changed") from None
                self.file.truncate(len(whole))
            else:  # whole, but for the end of its line
                self.file.write(b"\n")
        self.rows = {row.key: row for row in rows}

    def write(self, row: Evidence) -> None:
        if self.file is not None:
            self.file.write(json.dumps(dataclasses.asdict(row), ensure_ascii=False).encode("utf-8") + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())


def _hold(file: Any, path: Path) -> None:
    with contextlib.suppress(ImportError):  # no such lock on Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(f"{path} is being written by another process: one experiment a file at a time") from error


def read_rows(path: str | Path) -> list[Evidence]:
    """The rows of a file, a piece of a line at its end left out. Raises ``ValueError`` naming the line that is no row, ``OSError`` for no file."""
    content = Path(path).read_text(encoding="utf-8")
    return _parsed(content[: content.rfind("\n") + 1], path)


def _parsed(content: str, path: str | Path | None) -> list[Evidence]:
    rows = []
    for number, line in enumerate(
        content.removesuffix("\n").split("\n") if content else [], 1
    ):  # a text may hold other ends of lines
        try:
            rows.append(Evidence(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: line {number} is no row of an experiment: {error}") from error
    return rows


def recorded() -> list[Evidence]:
    """The rows of ``data/results/evidence.jsonl``: many strategies at several tasks, with the model of the course."""
    return read_rows(_data.path("results/evidence.jsonl"))


def frame(rows: Iterable[Evidence]) -> Any:
    """A pandas ``DataFrame``, one line a row: strategy, task, score, control and what it took; ``more`` as columns of its own."""
    import pandas as pd

    lines = []
    for row in rows:
        line = {
            name: value
            for name, value in dataclasses.asdict(row).items()
            if name not in ("settings", "task", "more", "said", "machine")
        }
        lines.append({"task": str(task_from_dict(row.task)), **line, **row.more})
    return pd.DataFrame(lines)
