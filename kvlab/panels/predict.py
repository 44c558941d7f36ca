"""A prediction: chosen before a cell runs, kept, and set beside what came out.

guess = Predict("4-bit codes take less room", 3, 3.5, 4, unit="times")
guess                  # as the last line of a cell: the reader chooses
guess.seen(3.56)       # in the cell that measures
predictions()          # all that were made here, as a table
"""

import datetime
import html
import json
import math
import warnings
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd

from kvlab.plots import style

FILE = "predictions.jsonl"  # beside the notebook: it is the reader's own

CSS = f"""<style>
.kvlab-predict {{ border-left: 4px solid {style.FULL}; padding: 2px 10px; margin: 4px 0; }}
.kvlab-predict .widget-html {{ height: auto; margin: 0; }}
.kvlab-predict .widget-radio {{ height: auto; }}
.kvlab-predict .widget-radio-box {{ height: auto; flex-flow: row wrap; gap: 2px 16px; }}
</style>"""


class Predict(widgets.VBox):
    """One question with two to six answers. `choice` is what the reader has chosen, an option or None; `line` says what came of it.

    A choice is written to ``out`` at once, a JSON line; once the answer was seen it can no longer be changed.

    Args:
        question: in a few words; it names the prediction in the table.
        options: numbers, or words.
        unit: of the numbers.
        out: the file; None takes `predictions.jsonl` in the working directory.

    Raises ``ValueError``: an empty question, fewer than two options, the same one twice, words and numbers mixed.
    """

    def __init__(self, question: str, *options: float | str, unit: str = "", out: str | Path | None = None) -> None:
        if not question:
            raise ValueError("Predict: the question is empty (allowed: a few words)")
        if not 2 <= len(options) <= 6 or len(set(options)) < len(options):
            raise ValueError(f"Predict: options={options!r} (allowed: 2 to 6, all different)")
        self._numbers = [float(one) for one in options if isinstance(one, int | float) and math.isfinite(one)]
        if len(self._numbers) not in (0, len(options)):
            raise ValueError(f"Predict: options={options!r} (allowed: finite numbers, or words, not both)")
        self.question, self.options, self.unit = question, options, unit
        self.path = Path(FILE if out is None else out)
        self.line = ""
        self._radio = widgets.RadioButtons(
            options=[(self._words(one), one) for one in options], value=None, description="I predict", orientation="horizontal",
            layout={"width": "auto"}, style={"description_width": "initial"},
        )  # fmt: skip
        self._told, self._lost = widgets.HTML(), ""  # what is said; that it could not be written down
        title = widgets.HTML(f"<b>{html.escape(question, quote=False)}</b>")
        super().__init__([widgets.HTML(CSS), title, self._radio, self._told])
        self.add_class("kvlab-predict")
        self._radio.observe(lambda _: self._chosen(), "value")

    @property
    def choice(self) -> float | str | None:
        return self._radio.value  # type: ignore[no-any-return]

    @choice.setter
    def choice(self, option: float | str) -> None:
        self._radio.value = option

    def seen(self, what: float | str) -> None:
        """Print what came out beside what was predicted. A number counts as the option nearest to it, by ratio where all options are above 0.

        Raises ``ValueError`` for words that are no option, or a number that is not finite.
        """
        answer = self._nearest(what)
        about = "about " if self._numbers else ""
        if self.choice is None:
            self.line = f"Nothing predicted. {self.question}: {about}{self._words(answer)}."
        elif self.choice == answer:
            self.line = f"Predicted {self._words(answer)}: right."
        else:
            self.line = f"Predicted {self._words(self.choice)}. {self.question}: {about}{self._words(answer)}."
        if self.choice is not None and not self._radio.disabled:
            self._write(answer)
        self._radio.disabled = True
        again = "" if self.choice is not None else " (Run this cell again to predict.)"
        self._told.value = html.escape(self.line + again, quote=False) + self._lost
        print(self.line)

    def _nearest(self, what: Any) -> float | str:
        if not self._numbers:
            if what not in self.options:
                raise ValueError(f"{self.question}: {what!r} is no option (allowed: {', '.join(map(str, self.options))})")
            return what  # type: ignore[no-any-return]
        number = float(what)
        if not math.isfinite(number):
            raise ValueError(f"{self.question}: {what!r} is not a finite number")
        if min(*self._numbers, number) > 0:
            far = [abs(math.log(one / number)) for one in self._numbers]
        else:
            far = [abs(one - number) for one in self._numbers]
        return self.options[far.index(min(far))]

    def _words(self, option: Any) -> str:
        if not self._numbers:
            return str(option)
        return f"{option:,} {self.unit}".replace(" %", "%").strip()

    def _chosen(self) -> None:
        self._told.value = ""
        self._write(None)

    def _write(self, seen: Any) -> None:
        row = {"question": self.question, "options": self.options, "unit": self.unit, "predicted": self.choice, "seen": seen}
        row["date"] = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._lost = ""
        except OSError as error:
            self._lost = f"<br><b>not kept: {html.escape(str(error), quote=False)}</b>"
        self._told.value = self._lost

    def __repr__(self) -> str:
        return f"{self.question}: {' / '.join(map(self._words, self.options))}? {self.line}".strip()


def predictions(path: str | Path = FILE) -> pd.DataFrame:
    """What was predicted and seen, of each question the newest line with what was seen, else the newest: columns question, predicted, seen, right, date.

    A line that is no prediction is left out, with a warning that names it. Without a file the table is empty.
    """
    newest: dict[str, dict[str, Any]] = {}
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if Path(path).is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            predicted, seen, unit = row["predicted"], row["seen"], row["unit"]
            right = None if seen is None else seen == predicted
            if seen is None and newest.get(row["question"], {}).get("seen"):
                continue
            newest[row["question"]] = {
                "question": row["question"], "predicted": f"{predicted} {unit}".strip(),
                "seen": "" if seen is None else f"{seen} {unit}".strip(), "right": right, "date": row["date"],
            }  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            warnings.warn(f"{path}: line {number} is no prediction and is left out: {error}", stacklevel=2)
    return pd.DataFrame(newest.values(), columns=["question", "predicted", "seen", "right", "date"])
