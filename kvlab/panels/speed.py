"""With a cache or without one: the time for one more token on the real model, at the lengths that a person chooses.

panel = CacheOrNot(lab)
panel             # the controls and the curves, as the last line of a cell
panel.speedup     # the same measurement in other figures, under the question that they answer
panel.phases
"""

import html
import os
import time
import traceback
from typing import Any

import ipywidgets as widgets

from kvlab.errors import Cancelled
from kvlab.lab import Lab
from kvlab.measure import speed
from kvlab.measure.speed import Speed
from kvlab.panels.drawing import library
from kvlab.panels.memory import Pictured, _labelled, captioned, widget
from kvlab.panels.runner import Runner, Ticket
from kvlab.plots import speed as plots
from kvlab.plots import style

MEASURED = "measured here"
SMALL = (16, 64, 256)  # tokens of context of the run that begins by itself
STEP = 4  # each length measured is this many times the one before
RUNS = 3


class CacheOrNot(Pictured):
    """Time for one more token over the context, with a cache and without.

    Driven by `context` (tokens; the longest text, the others are a quarter of the one before), `new_tokens` and `run`; `cancel`
    ends a run. It opens with the rows that were recorded for kvlab and, beside them, a short measurement of its own; from the
    first press of `run` on it shows what was measured here. `measured` and `recorded` hold the `Speed`, or None.

    `figure` and `summary`: the times. `speedup` and `phases`: boxes with the same rows in other figures. `error.value` is empty
    when all is well. With KVLAB_PICTURES=1 (saving for readers) nothing is measured by itself.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.measured: Speed | None = None
        self.recorded: Speed | None = None
        self._asked = False  # run was pressed, and something has arrived
        self._running = False  # a run that was asked for is under way
        self._last_progress = 0.0
        self.runner = Runner(self._ended)
        self._make()
        self.figure, self.summary = widget(plots.per_token({})), widgets.HTML()
        self.speedup, self.phases = captioned(plots.speedup({}), ""), captioned(plots.phases([]), "")
        choices = widgets.GridBox(
            [self.context, self.new_tokens],
            layout=widgets.Layout(grid_template_columns="repeat(auto-fit, minmax(300px, 1fr))", grid_gap="2px 16px"),
        )
        bar = widgets.HBox([self.run, self.cancel, self.progress, self.stage], layout=widgets.Layout(flex_flow="row wrap"))
        super().__init__([choices, bar, self.error, self.figure, self.summary, library()])
        self.run.on_click(lambda _: self._run())
        self.cancel.on_click(lambda _: self.runner.cancel())
        for choice in (self.context, self.new_tokens):
            choice.observe(self._changed, "value")
        try:
            self.recorded = speed.read()
        except FileNotFoundError:
            pass  # a checkout without recordings: only what is measured here
        except ValueError as problem:
            self._say(problem)
        self._draw()
        if os.environ.get("KVLAB_PICTURES") != "1":
            self._submit([n for n in SMALL if n <= self.context.value], 3, 1, asked=False)

    def _make(self) -> None:
        longest = min(4096, self._lab.context // 2)
        lengths = [2**power for power in range(4, longest.bit_length())]
        options = [(f"{tokens:,}", tokens) for tokens in lengths]
        chosen = min(512, lengths[-1])
        self.context = _labelled(widgets.SelectionSlider, "longest context (tokens)", options=options, value=chosen)
        self.new_tokens = _labelled(widgets.IntSlider, "tokens to generate at each length", min=2, max=16, value=4)
        self.run = widgets.Button(description="Run", button_style="primary", tooltip="measure at these lengths, on this machine")
        self.cancel = widgets.Button(description="Cancel", tooltip="end the run at its next step", disabled=True)
        self.progress = widgets.FloatProgress(min=0, max=1, layout=widgets.Layout(width="130px"))
        self.stage, self.error = widgets.HTML(), widgets.HTML()

    def wait(self, timeout: float = 600) -> bool:
        """Until the run has ended -> True; False after `timeout` seconds."""
        return self.runner.wait(timeout)

    def _changed(self, _: Any) -> None:
        """A run under way begins again: from a busy kernel, a slider's value may arrive after the press of the button."""
        with self.runner.lock:
            if self._running:
                self._run()

    def _run(self) -> None:
        lengths = [self.context.value]
        while lengths[-1] // STEP >= SMALL[0]:
            lengths.append(lengths[-1] // STEP)
        self._submit(lengths, self.new_tokens.value, RUNS, asked=True)

    def _submit(self, lengths: list[int], new_tokens: int, runs: int, *, asked: bool) -> None:
        with self.runner.lock:
            self._running = asked
            self.error.value = ""
            self.cancel.disabled = False
            self.stage.value = "waiting its turn"
            self.runner.submit(lambda ticket: self._work(ticket, lengths, new_tokens, runs, asked))

    def _work(self, ticket: Ticket, lengths: list[int], new_tokens: int, runs: int, asked: bool) -> None:
        """On the runner's thread."""

        def progress(stage: str, done: int, total: int) -> None:
            ticket.check()
            if time.monotonic() - self._last_progress > 0.1:
                self._last_progress = time.monotonic()
                ticket.show(self._progress, stage, done / total)

        def arrived(made: Speed) -> None:
            ticket.show(self._arrived, made, asked)

        speed.cache_speed(self._lab, lengths, new_tokens, runs=runs, progress=progress, arrived=arrived)

    # always under the runner's lock

    def _progress(self, stage: str, share: float) -> None:
        self.progress.value = share
        self.stage.value = f"{html.escape(stage)} {100 * share:.0f}%"

    def _arrived(self, made: Speed, asked: bool) -> None:
        self.measured, self._asked = made, self._asked or asked
        self._draw()

    def _ended(self, error: BaseException | None) -> None:
        self._running = False
        self.cancel.disabled = True
        self.progress.value = 0.0 if error else 1.0
        self.stage.value = "done" if error is None else "cancelled" if isinstance(error, Cancelled) else ""
        if error is not None and not isinstance(error, Cancelled):
            self._say(error)

    def _draw(self) -> None:
        shown = {}
        if self.recorded is not None and not self._asked:
            shown[plots.RECORDED] = self.recorded
        if self.measured is not None:
            shown[MEASURED] = self.measured
        rows = {label: made.rows for label, made in shown.items()}
        plots.update_per_token(self.figure, rows)
        plots.update_speedup(self.speedup.figure, rows)
        if not shown:
            return
        label, made = next(iter(shown.items()))  # the recorded rows, until there are own ones that were asked for
        plots.update_phases(self.phases.figure, made.rows)
        passes = {times: speed.crossing(made.rows, times) for times in plots.CLAIMED}
        for box, words in (
            (self, plots.per_token_summary(made.rows)),
            (self.speedup, plots.speedup_summary(made.rows, passes)),
            (self.phases, plots.phases_summary(made.rows)),
        ):
            box.summary.value = html.escape(f"{words} {label.capitalize()}: {made.where}.", quote=False)

    def _say(self, problem: BaseException) -> None:
        folded = html.escape("".join(traceback.format_exception(problem)))
        self.error.value = (
            f'<span style="color:{style.DANGER}">{html.escape(str(problem) or type(problem).__name__)}; '
            f"the figures below are from before</span><details><summary>traceback</summary><pre>{folded}</pre></details>"
        )
