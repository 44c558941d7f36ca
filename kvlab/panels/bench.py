"""What panels share that look into one text: it is read in the background, and every control may then be moved.

A panel of this kind says what its cards and controls are, and what to work out when one was moved; the bar, the line in red, progress, cancelled and
outdated runs, and the picture for readers are here. `StoreBench` is of the panels on keys and values, which read the text once.
"""

import base64
import html
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import ipywidgets as widgets
import plotly.graph_objects as go
from torch import Tensor

from kvlab import texts
from kvlab.errors import Cancelled
from kvlab.lab import Lab, Progress
from kvlab.measure import inspect
from kvlab.models import SMOLLM2
from kvlab.panels import opening
from kvlab.panels.drawing import library
from kvlab.panels.picture import sheet
from kvlab.panels.runner import Runner, Ticket, load_model
from kvlab.panels.views import Card, figure, legend, line
from kvlab.panels.widgets import HUES, QUESTIONS
from kvlab.plots import inspect as plots
from kvlab.plots import style
from kvlab.store.base import Store

LAYERS = "layers"  # the card with the errors of every layer, which each panel on a store has


class Drawing(NamedTuple):
    """A card with one figure: its title, the figure's height in pixels, and what makes the figure while there is nothing to show."""

    title: str
    height: int
    empty: Callable[[], go.Figure]


class Box(NamedTuple):
    """Some of the controls: their name, the question that they answer, their hue, and the widgets."""

    name: str
    question: str
    hue: str
    inside: Sequence[widgets.Widget]


class Bench(widgets.VBox):
    """One panel on one model and one text.

    `cancel` ends a run. `cards`, `figures`: by the names of `drawings`. `text` says all of it in words, `error.value` is empty when all is well.
    `shown` holds what is on show by name; under `asked`, what the controls had asked for.

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        prompt: text, or ids `[1, n]`; None takes the reference text.
        boxes: the controls; drawings: the cards by name; columns: where they stand.
    """

    asked: ClassVar[str] = "store"
    needs_model: ClassVar[bool] = True  # else a panel loads it when it wants it

    def __init__(
        self,
        lab: Lab | None,
        prompt: str | Tensor | None,
        *,
        boxes: Sequence[Box],
        drawings: Mapping[str, Drawing],
        columns: Sequence[Sequence[str]],
    ) -> None:
        self._lab, self._columns = lab, columns
        self._prompt = texts.prompts()["reference"] if prompt is None else prompt
        self.shown: dict[str, Any] = {}
        self._setting = False  # controls are being set by the panel itself
        self.opened = ""  # what a recording of how it opens is called, whether there is one or not
        self._last_progress = 0.0
        self.runner = Runner(self._ended)
        self.cancel = widgets.Button(description="Cancel", tooltip="end the run at its next step", disabled=True)
        self.progress = widgets.FloatProgress(min=0, max=1, layout={"width": "130px"})
        self.stage, self.error, self.model = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.figures: dict[str, go.FigureWidget] = {name: figure(own.empty(), own.height) for name, own in drawings.items()}
        self._legends = {name: line() for name in drawings}
        self.cards = {name: Card(own.title, [self.figures[name], self._legends[name]]) for name, own in drawings.items()}
        state = widgets.HBox([self.progress, self.stage]).add_class("kvlab-row").add_class("kvlab-grow")
        bar = widgets.HBox([self.model, self.cancel, state]).add_class("kvlab-bar")
        side = widgets.VBox([widgets.VBox([_box(box) for box in boxes]).add_class("kvlab-boxes")]).add_class("kvlab-side")
        self.placed = [widgets.VBox([self.cards[name] for name in names]).add_class("kvlab-column") for names in columns]
        body = widgets.HBox([side, widgets.VBox(self.placed).add_class("kvlab-figures")]).add_class("kvlab-main")
        super().__init__([bar, self.error, body, library()])
        self.add_class("kvlab")
        self.cancel.on_click(lambda _: self.runner.cancel())

    # what a panel of this kind says

    def _read(self) -> Any:
        """What the controls ask for. Raises `ValueError` where they do not go together."""
        raise NotImplementedError

    def _answer(self, ticket: Ticket, lab: Any, asked: Any, progress: Progress) -> None:
        """Work everything out, and show it; ``lab``: None only where ``needs_model`` is False. On the runner's thread."""
        raise NotImplementedError

    # for people and tests alike

    @property
    def text(self) -> str:
        """What the figures show, a line each."""
        return "\n".join(f"{card.title}: {card.text}" for card in self.cards.values() if card.text)

    def wait(self, timeout: float = 600) -> bool:
        """Until everything is on show -> True; False after `timeout` seconds."""
        return self.runner.wait(timeout)

    # a control was moved

    def _changed(self) -> None:
        if self._setting:
            return
        with self.runner.lock:
            try:
                asked = self._read()
            except ValueError as problem:
                self.runner.cancel()
                self._fail(problem)
                return
            self.error.value = ""
            self.cancel.disabled = False
            for card in self.cards.values():
                card.mark("waiting")
            self.stage.value = "waiting its turn"
            model = SMOLLM2 if self._lab is None else self._lab.name
            pause = opening.show(self, self.cards.values(), asked, model, self._prompt)
            self.runner.submit(lambda ticket: self._work(ticket, asked), pause)

    def _work(self, ticket: Ticket, asked: Any) -> None:
        """On the runner's thread."""

        def progress(stage: str, done: int, total: int) -> None:
            ticket.check()
            if time.monotonic() - self._last_progress > 0.1:
                self._last_progress = time.monotonic()
                ticket.show(self._progress, stage, done / max(1, total))

        if self.needs_model:
            self._load(ticket)
        self._answer(ticket, self._lab, asked, progress)

    def _load(self, ticket: Ticket) -> Lab:
        """On the runner's thread."""
        if self._lab is None:
            ticket.show(self._progress, "loading the model", 0.0)
            self._lab = load_model(SMOLLM2)
        return self._lab

    # always under the runner's lock

    def _name(self, tokens: int) -> None:
        assert self._lab is not None
        self.model.value = f"{html.escape(self._lab.name)}, {tokens:,} tokens"

    def _set(self, slider: widgets.IntSlider, low: int, high: int, value: int) -> None:
        self._setting = True
        try:
            slider.min, slider.max = min(low, slider.min), max(high, slider.max)
            slider.value = value
            slider.min, slider.max = low, high
        finally:
            self._setting = False

    def _say(self, name: str, words: str, note: str) -> None:
        card = self.cards[name]
        card.say(words)
        card.mark("fresh", note)
        self._legends[name].value = legend(self.figures[name])

    def _progress(self, stage: str, share: float) -> None:
        self.progress.value = share
        self.stage.value = f"{html.escape(stage)} {100 * share:.0f}%" if share else html.escape(stage)

    def _ended(self, error: BaseException | None) -> None:
        self.cancel.disabled = True
        self.progress.value = 0.0 if error else 1.0
        if error is None:
            self.stage.value = "done"
        elif not isinstance(error, Cancelled):
            self._fail(error)
        elif not self.error.value:  # else the controls have said what is wrong, and that is why it ended
            self.stage.value = "cancelled"
            self._leave_stale("stale: the run was cancelled")

    def _fail(self, error: BaseException) -> None:
        """One line in red; the figures are from before."""
        self.stage.value, self.cancel.disabled, self.progress.value = "", True, 0.0
        plain = isinstance(error, ValueError | OSError) and str(error)  # these were written for people
        words = str(error) if plain else f"{type(error).__name__}: {error}"
        details = "".join(traceback.format_exception(error))
        self.error.value = (
            f'<div class="kvlab-error" role="alert"><b>{html.escape(words, quote=False)}</b>'
            f"<details><summary>traceback</summary><pre>{html.escape(details, quote=False)}</pre></details></div>"
        )
        for card in self.cards.values():
            card.mark("waiting")
        self._leave_stale("stale: from before the error")

    def _leave_stale(self, why: str) -> None:
        for card in self.cards.values():
            if card.state != "fresh":
                card.mark("stale", why)

    # for notebooks that are read, not run

    def __repr__(self) -> str:
        if self.asked not in self.shown:
            return f"{type(self).__name__}: nothing looked at yet"
        return f"{type(self).__name__}: {self.shown[self.asked].to_code()}\n{self.text}"

    def _repr_mimebundle_(self, **settings: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**settings)
        if os.environ.get("KVLAB_PICTURES") == "1":
            self.wait()
            columns = [[(self.cards[name].title, self.figures[name]) for name in names] for names in self._columns]
            bundle["image/png"] = base64.b64encode(sheet(columns)).decode()
            bundle["text/plain"] = repr(self)
        return bundle


class StoreBench(Bench):
    """A panel on what a store makes of keys and values. The text is read once; `shown` holds "recorded", "store", "errors" and what the panel adds.

    Args:
        lab, prompt, drawings, columns: as in `Bench`; `LAYERS` is among the drawings.
        question: what the controls `look` answer.
        store: the controls of the store.
    """

    def __init__(
        self,
        lab: Lab | None,
        prompt: str | Tensor | None,
        *,
        question: str,
        look: Sequence[widgets.Widget],
        store: Sequence[widgets.Widget],
        drawings: Mapping[str, Drawing],
        columns: Sequence[Sequence[str]],
    ) -> None:
        self._recorded: inspect.Recorded | None = None
        self._errors: tuple[Store, inspect.LayerErrors] | None = None
        boxes = [Box("look at", question, style.FULL, look), Box("store", QUESTIONS["store"], HUES["store"], store)]
        super().__init__(lab, prompt, boxes=boxes, drawings=drawings, columns=columns)

    # what a panel of this kind says

    def _offer(self, recorded: inspect.Recorded) -> None:
        """The text has been read: set the ranges of the controls. Under the runner's lock."""
        raise NotImplementedError

    def _look(self, ticket: Ticket, recorded: inspect.Recorded, store: Store, progress: Progress) -> None:
        """Work everything out, and show it. On the runner's thread."""
        raise NotImplementedError

    # on the runner's thread

    def _answer(self, ticket: Ticket, lab: Lab, asked: Store, progress: Progress) -> None:
        recorded = self._recorded
        if recorded is None:
            recorded = inspect.record(lab, self._prompt, progress)
            ticket.show(self._meet, recorded)
        self._look(ticket, recorded, asked, progress)

    def _look_at_errors(
        self, ticket: Ticket, recorded: inspect.Recorded, store: Store, layer: int, progress: Progress, more: str = ""
    ) -> None:
        """The errors of every layer, in their card; `more` follows the line of text."""
        if self._errors is None or self._errors[0] != store:
            errors = inspect.layer_errors(recorded, store, progress)
            ticket.show(self._keep, store, errors)
        ticket.show(self._draw_errors, layer, more)

    # always under the runner's lock

    def _meet(self, recorded: inspect.Recorded) -> None:
        self._recorded = self.shown["recorded"] = recorded
        self._name(recorded.tokens)
        self._offer(recorded)

    def _keep(self, store: Store, errors: inspect.LayerErrors) -> None:
        self._errors = (store, errors)
        self.shown |= {"store": store, "errors": errors}

    def _draw_errors(self, layer: int, more: str) -> None:
        errors = self.shown["errors"]
        plots.update_layer_errors(self.figures[LAYERS], errors, layer)
        self._say(LAYERS, f"{plots.layer_errors_summary(errors)} {more}".strip(), "all heads, all tokens")


def slider(label: str, help: str, **settings: Any) -> widgets.IntSlider:
    """A slider of whole numbers that reports when it is released; its range comes with the text."""
    common = {"style": {"description_width": "initial"}, "layout": {"width": "auto"}, "continuous_update": False}
    made = widgets.IntSlider(description=label, tooltip=help, **{"min": 0, "max": 1, "value": 0} | settings, **common)
    return made.add_class("kvlab-setting")


def dropdown(label: str, options: Any, value: Any, help: str) -> widgets.Dropdown:
    """A choice among ``options``, a list or label -> value."""
    given = list(options.items()) if isinstance(options, Mapping) else options
    made = widgets.Dropdown(
        description=label, options=given, value=value, tooltip=help, style={"description_width": "initial"}, layout={"width": "auto"}
    )  # fmt: skip
    return made.add_class("kvlab-setting")


def stops(label: str, values: Sequence[int], value: int, help: str) -> widgets.SelectionSlider:
    """A slider that rests at ``values`` only, and reports when it is released."""
    common: dict[str, Any] = {"style": {"description_width": "initial"}, "layout": {"width": "auto"}, "continuous_update": False}
    made = widgets.SelectionSlider(
        description=label, options=[(f"{one:,}", one) for one in values], value=value, tooltip=help, **common
    )
    return made.add_class("kvlab-setting")


def start(panel: object, controls: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Set a panel's controls by their names. Raises ``ValueError`` for a name or a value that they do not have."""
    kind = type(panel).__name__
    for name, value in settings.items():
        if name not in controls:
            raise ValueError(f"{kind}: {name}={value!r} is none of its controls (allowed: {', '.join(controls)})")
        control = controls[name]
        if isinstance(control, widgets.IntSlider):
            allowed, fits = f"{control.min} to {control.max}", isinstance(value, int) and control.min <= value <= control.max
        elif isinstance(control, widgets.Checkbox):
            allowed, fits = "True, False", isinstance(value, bool)
        else:
            values = [one[1] for one in control.options]
            allowed, fits = ", ".join(map(str, values)), value in values
        if not fits:
            raise ValueError(f"{kind}: {name}={value!r} is not among its values (allowed: {allowed})")
        control.value = value


def _box(box: Box) -> widgets.Widget:
    head = widgets.HTML(f'<div class="kvlab-axis" style="--hue:{box.hue}"><b>{box.name}</b> {box.question}</div>')
    return widgets.VBox([head, *box.inside]).add_class("kvlab-box").add_class(f"kvlab-{box.name.replace(' ', '-')}")
