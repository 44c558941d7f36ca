"""The inspector: single keys and values of a real model, as it made them and as a store gives them back.

Inspector()          # as the last line of a cell

Every control is a widget: a person moves it, a test or a notebook sets its `value` and calls `wait()`.
"""

import base64
import html
import os
import time
import traceback
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
from torch import Tensor

from kvlab import texts
from kvlab.errors import Cancelled
from kvlab.lab import Lab
from kvlab.measure import inspect
from kvlab.models import SMOLLM2
from kvlab.panels.live_lab import _load
from kvlab.panels.picture import sheet
from kvlab.panels.runner import Runner, Ticket
from kvlab.panels.theme import CSS
from kvlab.panels.views import Card, _figure, _line, legend
from kvlab.panels.widgets import HUES, QUESTIONS, MethodControls
from kvlab.plots import inspect as plots
from kvlab.plots import style
from kvlab.store.base import Store
from kvlab.store.int import Int

START = Int(bits=4)
TITLES = {
    "token": "one token",
    "channels": "how large each channel is",
    "channel": "one channel over the tokens",
    "layers": "error by layer",
    "bits": "bits a number",
}
HEIGHTS = {"token": 430, "channels": 300, "channel": 280, "layers": 230, "bits": 220}


class Inspector(widgets.VBox):
    """One panel on one model and one text, which is read once.

    Controls: `what` ("keys" or "values"), `layer`, `head` (a KV head), `token`, `channel`; `controls` is the store, with `.choice` and
    `.settings[name]`; `cancel` ends a run. `cards`, `figures`: by the names of `TITLES`. `text` says all of it in words. `error.value` is
    empty when all is well. `shown` holds what is on show by name: "recorded", "written", "errors", "token", "channels", "channel".

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        prompt: text, or ids `[1, n]`; None takes the reference text.
        store: where it starts.
    """

    def __init__(self, lab: Lab | None = None, prompt: str | Tensor | None = None, store: Store | None = None) -> None:
        self._lab = lab
        self._prompt = texts.prompts()["reference"] if prompt is None else prompt
        self._recorded: inspect.Recorded | None = None
        self._written: inspect.Written | None = None
        self._errors: tuple[Store, inspect.LayerErrors] | None = None
        self.shown: dict[str, Any] = {}
        self._setting = False  # controls are being set by the panel itself
        self._last_progress = 0.0
        self.runner = Runner(self._ended)
        self._make(START if store is None else store)
        super().__init__([widgets.HTML(CSS), self._bar(), self.error, self._body()])
        self.add_class("kvlab")
        for choice in (self.what, self.layer, self.head, self.token, self.channel):
            choice.observe(lambda _: self._changed(), "value")
        self.cancel.on_click(lambda _: self.runner.cancel())
        self._changed()

    # what it is made of

    def _make(self, store: Store) -> None:
        common = {"style": {"description_width": "initial"}}
        self.what: Any = widgets.ToggleButtons(
            options=inspect.SIDES, value="keys", tooltips=["the keys of the head", "its values"], **common
        )
        self.what.style.button_width = "auto"
        self.layer = _slider("layer", "the layer that is looked into")
        self.head = _slider("KV head", "the KV head; several query heads may share it")
        self.token = _slider("token", "the token, counted from 0")
        self.channel = _slider("channel", "one of the numbers of a key or value; at the start the largest one")
        for control in (self.what, self.layer, self.head, self.token, self.channel):
            control.layout.width = "auto"
            control.add_class("kvlab-setting")
        self.what.layout.margin = "6px 0 2px"
        self.controls = MethodControls("store", store, self._changed)
        self.cancel = widgets.Button(description="Cancel", tooltip="end the run at its next step", disabled=True)
        self.progress = widgets.FloatProgress(min=0, max=1, layout={"width": "130px"})
        self.stage, self.error, self.model = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.figures: dict[str, go.FigureWidget] = {name: _figure(_empty(name), HEIGHTS[name]) for name in TITLES}
        self._legends = {name: _line() for name in TITLES}
        self.cards = {name: Card(title, [self.figures[name], self._legends[name]]) for name, title in TITLES.items()}

    def _bar(self) -> widgets.Widget:
        state = widgets.HBox([self.progress, self.stage]).add_class("kvlab-row").add_class("kvlab-grow")
        return widgets.HBox([self.model, self.cancel, state]).add_class("kvlab-bar")

    def _body(self) -> widgets.Widget:
        boxes = []
        for name, question, hue, inside in (
            ("look at", "which number?", style.FULL, [self.what, self.layer, self.head, self.token, self.channel]),
            ("store", QUESTIONS["store"], HUES["store"], [self.controls]),
        ):
            head = widgets.HTML(f'<div class="kvlab-axis" style="--hue:{hue}"><b>{name}</b> {question}</div>')
            boxes.append(widgets.VBox([head, *inside]).add_class("kvlab-box").add_class(f"kvlab-{name.replace(' ', '-')}"))
        side = widgets.VBox([widgets.VBox(boxes).add_class("kvlab-boxes")]).add_class("kvlab-side")
        columns = [
            widgets.VBox([self.cards[name] for name in names]).add_class("kvlab-column")
            for names in (("token", "channels"), ("channel", "layers", "bits"))
        ]
        return widgets.HBox([side, widgets.VBox(columns).add_class("kvlab-figures")]).add_class("kvlab-main")

    # for people and tests alike

    @property
    def store(self) -> Store:
        """What the controls say. Raises `ValueError` where they do not go together. Setting it sets the controls, and looks again."""
        made = self.controls.read()
        assert isinstance(made, Store)
        return made

    @store.setter
    def store(self, store: Store) -> None:
        self.controls.show(store)
        self._changed()

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
                store = self.store
            except ValueError as problem:
                self.runner.cancel()
                self._fail(problem)
                return
            self.error.value = ""
            self.cancel.disabled = False
            for card in self.cards.values():
                card.mark("waiting")
            self.stage.value = "waiting its turn"
            self.runner.submit(lambda ticket: self._work(ticket, store))

    def _work(self, ticket: Ticket, store: Store) -> None:
        """On the runner's thread."""

        def progress(stage: str, done: int, total: int) -> None:
            ticket.check()
            if time.monotonic() - self._last_progress > 0.1:
                self._last_progress = time.monotonic()
                ticket.show(self._progress, stage, done / max(1, total))

        recorded = self._recorded
        if recorded is None:
            if self._lab is None:
                ticket.show(self._progress, "loading the model", 0.0)
                self._lab = _load(SMOLLM2)
            recorded = inspect.record(self._lab, self._prompt, progress)
            ticket.show(self._meet, recorded)
        layer, written = self.layer.value, self._written
        if written is None or (written.layer, written.store) != (layer, store):
            written = inspect.write(recorded, store, layer)
        ticket.show(self._offer, written)
        ticket.show(self._look, written)
        if self._errors is None or self._errors[0] != store:
            errors = inspect.layer_errors(recorded, store, progress)
            ticket.show(self._keep, store, errors)
        ticket.show(self._draw_layers, layer)

    # always under the runner's lock

    def _meet(self, recorded: inspect.Recorded) -> None:
        """The text has been read: offer its layers and tokens, and begin in the middle."""
        assert self._lab is not None
        self._recorded = self.shown["recorded"] = recorded
        self.controls.limit(recorded.tokens)
        self.model.value = f"{html.escape(self._lab.name)}, {recorded.tokens:,} tokens"
        last = len(recorded.layers) - 1
        self._set(self.layer, 0, last, min(12, last))
        keys = recorded.layers[self.layer.value][0]
        self._set(self.head, 0, keys.shape[1] - 1, 0)
        first, rows = recorded.first[self.layer.value], keys.shape[2]
        self._set(self.token, first, first + rows - 1, first + rows // 2)
        self._set(self.channel, 0, keys.shape[3] - 1, int(keys[0, 0].abs().amax(0).argmax()))

    def _offer(self, written: inspect.Written) -> None:
        """The heads, tokens and channels of this layer; a value that is none of them moves to the nearest."""
        self._written = self.shown["written"] = written
        heads, rows, dim = written.side(self.what.value).exact.shape
        for slider, low, count in ((self.head, 0, heads), (self.token, written.first, rows), (self.channel, 0, dim)):
            high = low + count - 1
            if (slider.min, slider.max) != (low, high):
                self._set(slider, low, high, min(max(slider.value, low), high))

    def _set(self, slider: widgets.IntSlider, low: int, high: int, value: int) -> None:
        self._setting = True
        try:
            slider.min, slider.max = min(low, slider.min), max(high, slider.max)
            slider.value = value
            slider.min, slider.max = low, high
        finally:
            self._setting = False

    def _look(self, written: inspect.Written) -> None:
        what, head, token, channel = self.what.value, self.head.value, self.token.value, self.channel.value
        one = inspect.token(written, what, head, token)
        sizes = inspect.channels(written, what, head)
        steps = inspect.channel(written, what, head, token, channel)
        self.shown |= {"token": one, "channels": sizes, "channel": steps}
        rows, promised = written.bits(), written.promised
        plots.update_token(self.figures["token"], one, channel)
        plots.update_channels(self.figures["channels"], sizes, channel)
        plots.update_channel(self.figures["channel"], steps)
        plots.update_bits(self.figures["bits"], rows, promised)
        where = f"layer {written.layer}, KV head {head}, {what}"
        self._say("token", plots.token_summary(one, written.layer, head, what, channel), where)
        self._say("channels", plots.channels_summary(sizes, what), where)
        self._say("channel", plots.channel_summary(steps), f"channel {channel}")
        self._say("bits", plots.bits_summary(rows, promised, written.plain), f"layer {written.layer}")

    def _keep(self, store: Store, errors: inspect.LayerErrors) -> None:
        self._errors = (store, errors)
        self.shown["errors"] = errors

    def _draw_layers(self, layer: int) -> None:
        errors = self.shown["errors"]
        plots.update_layer_errors(self.figures["layers"], errors, layer)
        self._say("layers", plots.layer_errors_summary(errors), "all heads, all tokens")

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
        if not self.text:
            return "Inspector: nothing looked at yet"
        return f"Inspector: {self.shown['written'].store.to_code()}\n{self.text}"

    def _repr_mimebundle_(self, **settings: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**settings)
        if os.environ.get("KVLAB_PICTURES") == "1":
            self.wait()
            titled = {name: (title, self.figures[name]) for name, title in TITLES.items()}
            columns = [[titled[name] for name in names] for names in (("token", "channels"), ("channel", "layers", "bits"))]
            bundle["image/png"] = base64.b64encode(sheet(columns)).decode()
            bundle["text/plain"] = repr(self)
        return bundle


def _slider(label: str, help: str) -> widgets.IntSlider:
    common = {"style": {"description_width": "initial"}, "continuous_update": False}
    return widgets.IntSlider(description=label, tooltip=help, min=0, max=1, value=0, **common)


def _empty(name: str) -> go.Figure:
    """The figure of a card before there is anything to show."""
    return {
        "token": lambda: plots.token(None, 0, title=""),
        "channels": lambda: plots.channels(None, 0, title=""),
        "channel": lambda: plots.channel(None, title=""),
        "layers": lambda: plots.layer_errors(None, title=""),
        "bits": lambda: plots.bits({}, {}, title=""),
    }[name]()
