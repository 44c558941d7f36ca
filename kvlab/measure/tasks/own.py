"""Own: questions of the user's, from a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvlab.lab import Lab
from kvlab.measure.tasks.base import Case, Question, Task

COLUMNS = ("context", "question", "expected")


@dataclass(frozen=True)
class Own(Task):
    """Every row of ``file`` is a text that is read, what then follows, and what the continuation must begin with: columns ``context``, ``question``,
    ``expected`` (others are ignored). Rows with the same context that follow each other are asked in turn through one cache.

    Raises ``ValueError`` for a file that is not there, misses a column, has no rows, or a row with an empty field.
    """

    title = "own questions"

    file: str = ""

    def check(self) -> None:
        if not self.file or not Path(self.file).is_file():
            raise ValueError(f"Own: file={self.file!r} is not there (allowed: a CSV file with the columns {', '.join(COLUMNS)})")
        self._rows()

    def _rows(self) -> list[dict[str, str]]:
        with open(self.file, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(
                    f"Own: {self.file} has no column {', '.join(missing)} (it has {', '.join(reader.fieldnames or ['none'])})"
                )
            rows = []
            for row in reader:
                empty = [name for name in COLUMNS if not (row[name] or "").strip()]
                if empty:
                    raise ValueError(f"Own: {self.file}, line {reader.line_num}: {', '.join(empty)} is empty")
                rows.append({name: row[name] for name in COLUMNS})
        if not rows:
            raise ValueError(f"Own: {self.file} has no rows")
        return rows

    def cases(self, lab: Lab) -> Iterator[Case]:
        context, questions = "", list[Question]()
        for row in self._rows():
            if questions and row["context"] != context:
                yield Case(context, tuple(questions))
                questions = []
            context = row["context"]
            questions.append(Question(row["question"], row["expected"]))
        yield Case(context, tuple(questions))
