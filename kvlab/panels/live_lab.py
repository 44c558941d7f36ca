"""The live lab: choose a strategy, and see on a real model what it costs and what it breaks.

    LiveLab()          # as the last line of a cell

Every control is a widget: a person moves it, a test or a notebook sets its `value` and calls `wait()`.
"""

import base64
import contextlib
import html
import os
import time
import traceback
from typing import Any

import ipywidgets as widgets

from kvlab import lab, texts
from kvlab.errors import Cancelled
from kvlab.keep.heavy_hitter import HeavyHitter
from kvlab.measure.scale import Prediction, scaled
from kvlab.measure.session import Ran, Request, Row, Scores, Session
from kvlab.measure.tasks import Needle
from kvlab.models import SMOLLM2
from kvlab.panels import opening
from kvlab.panels.drawing import library
from kvlab.panels.picture import sheet
from kvlab.panels.runner import Runner, Ticket, load_model
from kvlab.panels.views import AttentionCard, Card, MemoryCard, QualityCard, SaysCard, TableCard
from kvlab.panels.widgets import StrategyControls
from kvlab.store.int import Int
from kvlab.strategy import Strategy

START = Strategy(keep=HeavyHitter(budget=256, recent=64, sinks=4), store=Int(bits=4))
NAMES = {"reference": "reference text", "story": "a story's beginning", "question": "a question on the text"}
OWN, OTHER = "own text", "another …"
NEW_TOKENS = 24


class LiveLab(widgets.VBox):
    """One panel on one model.

    Controls: `model`, `folder` (any folder or hub id), `prompt`, `text` (its words), `edit`, `run`, `cancel`, `controls`
    (`.keep`, `.store`, `.place` with `.choice` and `.settings[name]`, and `.chunk`), `pin`, `code`, `reset`.
    Cards: `memory`, `attention`, `quality`, `says`, `table`, each with `.state` and `.text`. `error.value` is empty when all is
    well. `shown` holds the results on show by name: "prediction", "ran", "scores", "needle", "row", "full", and "prompt".

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        prompt: your own text; None starts with the reference text.
        strategy: where it starts, and what reset goes back to.
    """

    def __init__(self, lab: lab.Lab | None = None, prompt: str | None = None, strategy: Strategy | None = None) -> None:
        self._start, self._own, self._first_prompt = strategy or START, prompt, prompt
        self._session = Session(lab) if lab is not None else None
        self._known = {lab.name: self._session} if lab is not None and self._session else {}  # the two newest
        self.shown: dict[str, Any] = {}
        self.pinned: dict[str, Any] = {}
        self._whole: dict[str, Any] = {}  # the results of the last run that came to its end
        self.runner = Runner(self._ended)
        # what needs no model is drawn beside it, so that a run in progress holds nothing up; its errors are the run's own, too
        self.sketch = Runner(lambda error: None, settle=0.02, heavy=False, lock=self.runner.lock)
        self._asked = self._sketched = 0  # the newest request, and the newest whose prediction has been drawn
        self._setting = False  # controls are being set by the panel itself
        self._tokens: dict[str, int] = {}
        self._last_progress = 0.0
        self.opened = ""  # what a recording of how it opens is called, whether there is one or not
        self._make(lab.name if lab is not None else SMOLLM2)
        super().__init__([self._bar(), self.text, self.error, self._body(), self.code_text, library()])
        self.add_class("kvlab")
        self._listen()
        if self._session is not None:
            self._meet(self._session)
        self._changed()

    # what it is made of

    @property
    def _first_choice(self) -> str:
        return texts.PROMPTS[0] if self._first_prompt is None else OWN

    def _make(self, model: str) -> None:
        wide = {"style": {"description_width": "initial"}, "layout": {"width": "auto"}}
        self.model = widgets.Dropdown(
            description="model", options=list(dict.fromkeys([model, SMOLLM2, OTHER])), value=model, **wide
        )
        self.folder = widgets.Text(
            placeholder="a local folder or a hub id, then Enter",
            continuous_update=False,
            layout={"width": "260px", "display": "none"},
        )
        prompts = texts.prompts()
        options = [(NAMES.get(name, name), name) for name in prompts] + [(OWN, OWN)]
        first = self._first_choice
        self.prompt = widgets.Dropdown(description="prompt", options=options, value=first, **wide)
        self.edit = widgets.ToggleButton(description="edit", tooltip="show the prompt's text, and change it")
        self.text = widgets.Textarea(
            value=prompts.get(first, self._first_prompt),
            continuous_update=False,
            layout={"width": "auto", "height": "130px", "display": "none"},
        )
        self.run = widgets.Button(description="Run", button_style="primary", tooltip="measure again, even what is known")
        self.cancel = widgets.Button(description="Cancel", tooltip="end the run at its next step", disabled=True)
        self.progress = widgets.FloatProgress(min=0, max=1, layout={"width": "130px"})
        self.stage = widgets.HTML()
        self.error = widgets.HTML()
        self.controls = StrategyControls(self._start, self._changed)
        self.pin = widgets.ToggleButton(
            description="pin as A", tooltip="hold this run as A, and compare the next ones with it", disabled=True
        )
        self.code = widgets.ToggleButton(description="code", tooltip="this strategy as Python that runs")
        self.reset = widgets.Button(description="reset", tooltip="everything as it was at the start")
        self.code_text = widgets.Textarea(layout={"width": "auto", "height": "190px", "display": "none"})
        self.memory, self.attention, self.quality = MemoryCard(), AttentionCard(), QualityCard()
        self.says, self.table = SaysCard(), TableCard()

    @property
    def cards(self) -> tuple[Card, ...]:
        return (self.memory, self.attention, self.quality, self.says, self.table)

    def _bar(self) -> widgets.Widget:
        state = widgets.HBox([self.progress, self.stage]).add_class("kvlab-row").add_class("kvlab-grow")
        return widgets.HBox([self.model, self.folder, self.prompt, self.edit, self.run, self.cancel, state]).add_class(
            "kvlab-bar"
        )

    def _body(self) -> widgets.Widget:
        foot = widgets.HBox([self.pin, self.code, self.reset]).add_class("kvlab-foot")
        side = widgets.VBox([self.controls.add_class("kvlab-boxes"), foot]).add_class("kvlab-side")
        columns = [
            widgets.VBox(cards).add_class("kvlab-column") for cards in ([self.memory, self.says], [self.attention, self.quality])
        ]
        figures = widgets.VBox(columns).add_class("kvlab-figures")
        return widgets.VBox([widgets.HBox([side, figures]).add_class("kvlab-main"), self.table]).add_class("kvlab-all")

    def _listen(self) -> None:
        for control, name, answer in (
            (self.model, "value", self._choose_model),
            (self.folder, "value", self._changed),
            (self.prompt, "value", self._choose_prompt),
            (self.text, "value", self._edit_text),
            (self.edit, "value", lambda: _visible(self.text, self.edit.value)),
            (self.code, "value", self._show_code),
            (self.pin, "value", self._pin),
            (self.attention.layer, "value", self._changed),
            (self.attention.head, "value", self.attention.redraw),
            (self.attention.view, "value", self.attention.redraw),
            (self.memory.model, "value", self.memory.fit_devices),
            (self.says.depth, "value", self._changed),
        ):
            control.observe(lambda _, answer=answer: self._safely(answer), name)
        for choice in (self.memory.model, self.memory.hardware, self.memory.devices, self.memory.requests):
            choice.observe(lambda _: self._safely(self._scale), "value")
        self.run.on_click(lambda _: self._safely(self._changed, fresh=True))
        self.cancel.on_click(lambda _: self._stop())
        self.reset.on_click(lambda _: self._safely(self._reset))

    # for people and tests alike

    @property
    def strategy(self) -> Strategy:
        """What the controls say. Raises `ValueError` where they do not go together. Setting it sets the controls, and runs."""
        return self.controls.read()

    @strategy.setter
    def strategy(self, strategy: Strategy) -> None:
        self.controls.show(strategy)
        self._changed()

    @property
    def row(self) -> Row:
        """The table's line for what the controls say. Raises `LookupError` until that has been measured, and where the run was cancelled or failed."""
        if "row" not in self.shown or self.table.state != "fresh":
            raise LookupError("this has not been measured yet: wait() for the run, and look at error.value")
        return self.shown["row"]

    def wait(self, timeout: float = 600) -> bool:
        """Until the run has ended -> True; False after `timeout` seconds."""
        return self.sketch.wait(timeout) and self.runner.wait(timeout)

    # a control was moved

    def _changed(self, *, fresh: bool = False) -> None:
        """Take the request down; all work is done in the background, so that the next value can come at once."""
        if self._setting:
            return
        with self.runner.lock:
            try:
                strategy = self.controls.read()
            except ValueError as problem:
                self._stop()
                for card in self.cards:
                    card.mark("waiting")
                self._fail(problem, traceback.format_exc())
                return
            name = self.folder.value.strip() if self.model.value == OTHER else self.model.value
            if not name:
                return
            prompt, depth = self.text.value, self.says.depth.value
            self._say_error("")
            for card in self.cards:
                card.mark("waiting")
            pause = opening.show(self, self.cards, (strategy, depth), name, prompt)
            self.cancel.disabled = False
            self.stage.value = "waiting its turn"
            if self.code.value:
                self._show_code()
            self._asked += 1
            number, session = self._asked, self._session
            self.runner.submit(lambda ticket: self._work(ticket, number, name, strategy, prompt, depth, fresh), pause)
            if session is not None and session.lab.name == name and prompt in self._tokens:
                self.sketch.submit(lambda ticket: self._sketch(ticket, number, session, strategy, prompt))

    def _sketch(self, ticket: Ticket, number: int, session: Session, strategy: Strategy, prompt: str) -> None:
        ticket.show(self._predicted, number, strategy, session.predict(strategy, prompt, NEW_TOKENS))

    def _work(self, ticket: Ticket, number: int, name: str, strategy: Strategy, prompt: str, depth: float, fresh: bool) -> None:
        """On the runner's thread."""

        def progress(stage: str, done: int, total: int) -> None:
            ticket.check()
            if time.monotonic() - self._last_progress > 0.1:
                self._last_progress = time.monotonic()
                ticket.show(self._progress, stage, done / max(1, total))

        session = self._session
        if session is None or session.lab.name != name:
            ticket.show(self._progress, "loading the model", 0.0)
            session = self._known.get(name)
            if session is None:
                session = Session(load_model(name))
                self._known = dict([*self._known.items(), (name, session)][-2:])
            ticket.show(self._meet, session)
        tokens = session.tokens(prompt)
        ticket.show(self._count, prompt, tokens)
        request = Request(strategy, prompt, layer=self.attention.layer.value, new_tokens=NEW_TOKENS, depth=depth)
        for stage in session.run(request, progress, fresh=fresh):
            ticket.show(self._show, number, request, stage)
        ticket.show(self._finish, session.full_row(request, progress))

    # results arrive; always under the runner's lock

    def _meet(self, session: Session) -> None:
        """A model is there: offer its layers and heads."""
        self._session = session
        self._tokens.clear()
        shape = session.lab.geometry
        self._setting = True
        try:
            self.attention.offer(len(shape.layers), shape.query_heads)
        finally:
            self._setting = False

    def _count(self, prompt: str, tokens: int) -> None:
        self._tokens[prompt] = tokens
        self.controls.limit(tokens + NEW_TOKENS)
        self.edit.description = f"edit ({tokens:,} tokens)"

    def _progress(self, stage: str, share: float) -> None:
        self.progress.value = share
        self.stage.value = f"{html.escape(stage)} {100 * share:.0f}%" if share else html.escape(stage)

    def _show(self, number: int, request: Request, stage: Any) -> None:
        if isinstance(stage, Prediction):
            self._predicted(number, request.strategy, stage)
        elif isinstance(stage, Ran):
            self.shown |= {"ran": stage, "prompt": request.prompt}
            self.memory.show(self.shown["prediction"], stage, self.pinned.get("prediction"))
            self.attention.show(stage)
            self.says.show(request.prompt, stage, self.pinned.get("ran"))
            for card in (self.memory, self.attention):
                card.mark("fresh", str(request.strategy))
            self.says.mark("fresh", f"greedy, {len(stage.generation.tokens)} tokens")
        elif isinstance(stage, Scores):
            self.shown["scores"] = stage
            self.quality.show(stage, self.pinned.get("scores"))
            self.quality.mark("fresh", f"{len(stage.words)} tokens, after {stage.prefill}")
        elif isinstance(stage, Needle):
            self.shown["needle"] = stage
            self.says.show_needle(stage)
        elif isinstance(stage, Row):
            self.shown["row"] = stage
            if stage.perplexity is None:
                self.shown.pop("scores", None)
                self.quality.show(None)
                self.quality.mark("fresh")
            if stage.found is None:
                self.shown.pop("needle", None)
                self.says.show_needle(None)

    def _predicted(self, number: int, strategy: Strategy, made: Prediction) -> None:
        if number <= self._sketched:
            return
        self._sketched = number
        self.shown["prediction"] = made
        self.memory.show(made, None, self.pinned.get("prediction"))
        self.memory.recorded = ""
        self.memory.mark("waiting", "predicted; measuring …")
        self._draw_scale(strategy)

    def _finish(self, full: Row) -> None:
        self.shown["full"] = full
        self.table.show(full, self.shown["row"], self.pinned.get("row"))
        self.table.mark("fresh")
        self._whole = dict(self.shown)
        self.pin.disabled = False

    def _ended(self, error: BaseException | None) -> None:
        """The run is over: well, cancelled, or with an error."""
        self.cancel.disabled = True
        self.progress.value = 0.0 if error else 1.0
        if error is None:
            self.stage.value = "done"
        elif isinstance(error, Cancelled):
            if not self.error.value:  # else the controls have said what is wrong, and that is why it ended
                self.stage.value = "cancelled"
                self._leave_stale("stale: the run was cancelled")
        else:
            self._fail(error, "".join(traceback.format_exception(error)))

    def _fail(self, error: BaseException, details: str) -> None:
        self.stage.value = ""
        self.cancel.disabled = True
        self.progress.value = 0.0
        plain = isinstance(error, ValueError | OSError) and str(error)  # these were written for people
        self._say_error(str(error) if plain else f"{type(error).__name__}: {error}", details)
        self._leave_stale("stale: from before the error")

    def _leave_stale(self, why: str) -> None:
        """What the ended run has not brought up to date is stale."""
        for card in self.cards:
            if card.state != "fresh":
                card.mark("stale", why)

    def _stop(self) -> None:
        self.sketch.cancel()
        self.runner.cancel()

    def _say_error(self, words: str, details: str = "") -> None:
        if not words:
            self.error.value = ""
            return
        self.error.value = (
            f'<div class="kvlab-error" role="alert"><b>{html.escape(words, quote=False)}</b>'
            f"<details><summary>traceback</summary><pre>{html.escape(details, quote=False)}</pre></details></div>"
        )

    def _safely(self, answer: Any, **how: Any) -> None:
        """Call what answers a control; an error in it is said, never swallowed."""
        with self.runner.lock:
            try:
                answer(**how)
            except Exception as problem:
                self._fail(problem, traceback.format_exc())

    # single controls

    def _choose_model(self) -> None:
        _visible(self.folder, self.model.value == OTHER)
        self._changed()

    def _choose_prompt(self) -> None:
        if self._setting:
            return
        if self.prompt.value == OWN:
            self.edit.value = True
            if self._own is not None:
                self.text.value = self._own
            return
        self._set(self.text, texts.prompts()[self.prompt.value])
        self._changed()

    def _edit_text(self) -> None:
        if self._setting:
            return
        self._own = self.text.value
        self._set(self.prompt, OWN)
        self._changed()

    def _scale(self) -> None:
        """What the strategy is scaled to was changed. (A strategy that cannot be has been said already.)"""
        with contextlib.suppress(ValueError):
            self._draw_scale(self.controls.read())

    def _draw_scale(self, strategy: Strategy) -> None:
        """The big model's figure; its faults are its own, and leave the rest alone."""
        card = self.memory
        try:
            made = scaled(
                strategy, card.model.value, card.hardware.value, devices=card.devices.value, requests=card.requests.value
            )
        except ValueError as problem:
            card.fail_scale(f"{card.model.value}: {problem}")
        else:
            card.show_scale(made)

    def _pin(self) -> None:
        self.pinned = pinned = dict(self._whole) if self.pin.value else {}
        self.pin.description = "unpin A" if self.pin.value else "pin as A"
        if self.runner.busy or any(card.state != "fresh" for card in self.cards):
            return  # what arrives will be drawn beside A
        shown = self._whole
        self.memory.show(shown["prediction"], shown["ran"], pinned.get("prediction"))
        self.says.show(shown["prompt"], shown["ran"], pinned.get("ran"))
        self.says.show_needle(shown.get("needle"))
        self.quality.show(shown.get("scores"), pinned.get("scores"))
        self.table.show(shown["full"], shown["row"], pinned.get("row"))

    def _show_code(self) -> None:
        _visible(self.code_text, self.code.value)
        name = self.model.value if self.model.value != OTHER else self.folder.value
        shipped = self.prompt.value != OWN
        prompt = f'texts.prompts()["{self.prompt.value}"]' if shipped else repr(self.text.value)
        self.code_text.value = "\n".join(
            [
                "import kvlab",
                f"from kvlab import keep, place, store{', texts' if shipped else ''}",
                "",
                f"lab = kvlab.load({name!r})",
                f"strategy = {self.controls.read().to_code()}",
                f"run = lab.generate({prompt}, strategy, max_new_tokens={NEW_TOKENS})",
                "print(run.text)",
                "print(run.memory)",
            ]
        )

    def _reset(self) -> None:
        self.pin.value = False
        self._setting = True
        try:
            self.controls.show(self._start)
            self.prompt.value = self._first_choice
            self.text.value = texts.prompts().get(self.prompt.value, self._first_prompt)
            self.edit.value = self.code.value = False
            self.says.depth.value = 0.25
            self.attention.view.value = "steps"
            self.memory.model.value, self.memory.hardware.value = "Llama-3.1-8B", "H100 SXM 80GB"
            self.memory.devices.value, self.memory.requests.value = 1, 16
        finally:
            self._setting = False
        for toggled, box in ((self.edit, self.text), (self.code, self.code_text)):
            _visible(box, toggled.value)
        self._changed()

    def _set(self, control: Any, value: Any) -> None:
        before, self._setting = self._setting, True
        try:
            control.value = value
        finally:
            self._setting = before

    # for notebooks that are read, not run

    def __repr__(self) -> str:
        if "row" not in self.shown:
            return "LiveLab: nothing measured yet"
        lines = [f"{card.title}: {card.text}" for card in self.cards if card.text]
        return "\n".join([f"LiveLab: {self.shown['row'].strategy}", *lines, *self.table.lines])

    def _repr_mimebundle_(self, **settings: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**settings)
        if os.environ.get("KVLAB_PICTURES") == "1":
            self.wait()
            left = [("memory: this run", self.memory.figure), ("memory: scaled up", self.memory.scale_figure)]
            right = [("attention: one head of one layer", self.attention.figure), ("quality along the text", self.quality.figure)]
            bundle["image/png"] = base64.b64encode(sheet([left, right])).decode()
            bundle["text/plain"] = repr(self)
        return bundle


def _visible(box: widgets.Widget, shown: bool) -> None:
    box.layout.display = None if shown else "none"
