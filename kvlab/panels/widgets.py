"""Controls made from what the methods declare: a method of an axis with its settings, and a whole strategy.

Nothing here knows a method by name. `read()` gives what the controls say, or raises the `ValueError` of a combination that is
not allowed; `show(...)` sets them without telling anyone.
"""

import html
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import ipywidgets as widgets

from kvlab.plots import style
from kvlab.strategy import AXES, DEFAULTS, Method, Setting, Strategy, methods

HUES = {"keep": style.KEEP, "store": style.STORE, "place": style.PLACE}
QUESTIONS = {"keep": "which tokens stay?", "store": "how is a token written down?", "place": "where do the bytes live?"}
Changed = Callable[[], None]


def control(name: str, setting: Setting, default: Any, changed: Changed) -> widgets.Widget:
    """The widget for one setting, by its declaration alone; its label carries the unit, its tooltip the help text."""
    label = label_of(name, setting)
    common = {"description": label, "tooltip": setting.help, "style": {"description_width": "initial"}}
    made: Any
    if isinstance(default, Method):
        made = MethodControls(default.axis, default, changed, label)
        made.choice.tooltip = setting.help  # a box cannot carry one: the browser's side of ipywidgets fails on it
        return made.add_class("kvlab-nested")
    if setting.choices is not None:
        options = [(str(choice), choice) for choice in setting.choices]
        short = len(options) <= 4 and sum(len(text) for text, _ in options) <= 24
        made = (widgets.ToggleButtons if short else widgets.Dropdown)(options=options, value=default, **common)
        if short:
            made.style.button_width = "auto"
            made.tooltips = [setting.help] * len(options)
    elif isinstance(default, bool):
        made = widgets.Checkbox(value=default, indent=False, **common)
    elif isinstance(default, str):
        made = widgets.Text(value=default, continuous_update=False, **common)
    elif isinstance(default, float):
        low, high, step = setting.low or 0.0, setting.high if setting.high is not None else 1.0, setting.step or 0.01
        made = widgets.FloatSlider(value=default, min=low, max=high, step=step, continuous_update=False, **common)
    elif stops := doublings(setting):
        made = widgets.SelectionSlider(options=sorted({*stops, default}), value=default, continuous_update=False, **common)
    else:
        low, high, step = whole_range(setting, default)
        made = widgets.IntSlider(value=default, min=low, max=high, step=step, continuous_update=False, **common)
    made.layout.width = "auto"
    made.add_class("kvlab-setting")
    made.observe(lambda _: changed(), "value")
    return made


def label_of(name: str, setting: Setting) -> str:
    """What stands beside a control: the setting's name, and its unit where that says more."""
    title = setting.title or name.replace("_", " ")
    return f"{title} ({setting.unit})" if setting.unit not in ("", title) else title


def doublings(setting: Setting) -> list[int]:
    """Stops of a slider whose range spans more than 32-fold and is no count of tokens: low, 2 low, 4 low, ..., high."""
    low, high = setting.low, setting.high
    if setting.unit == "tokens" or not low or not high or high < 32 * low:
        return []
    stops = [int(low)]
    while 2 * stops[-1] <= high:
        stops.append(2 * stops[-1])
    return stops


def whole_range(setting: Setting, default: int) -> tuple[int, int, int]:
    """(low, high, step) of a slider of whole numbers; low on the grid of steps, so that the stops are round numbers."""
    step, low = int(setting.step or 1), int(setting.low or 0)
    high = int(setting.high) if setting.high is not None else max(default, 1) * 8
    return -(-low // step) * step, high, step


class MethodControls(widgets.VBox):
    """The choice of a method of an axis, and the settings of the chosen one. `choice.value` is its name, `settings` its widgets.

    What was set for a method is still there when a person comes back to it. `label` stands above the choice, where one method is a
    setting of another.
    """

    def __init__(self, axis: str, value: Method, changed: Changed, label: str = "") -> None:
        super().__init__()
        self.label = label
        self.axis, self._tell = axis, changed
        self._made: dict[str, dict[str, Any]] = {}
        self._said: dict[
            tuple[str, str], Any
        ] = {}  # what a slider cannot show: a budget as a share or as bytes, until it is moved
        self._quiet = False
        self._tokens: int | None = None
        # what changes nothing comes first, then by what a person reads
        known = sorted(methods(axis).items(), key=lambda item: (item[0] != DEFAULTS[axis], item[1].title.casefold()))
        options = [(cls.title or name, name) for name, cls in known]
        self.choice = widgets.RadioButtons(options=options, value=type(value).__name__, layout={"width": "auto"})
        self.choice.add_class("kvlab-choice")
        self.source = widgets.HTML()
        self.show(value)
        self.choice.observe(self._chosen, "value")

    @property
    def method(self) -> type[Method]:
        return methods(self.axis)[self.choice.value]

    @property
    def settings(self) -> dict[str, Any]:
        """name -> widget, of the chosen method."""
        name = self.choice.value
        if name not in self._made:
            fields: Any = self.method.__dataclass_fields__  # type: ignore[attr-defined]
            self._made[name] = {
                key: control(key, setting, fields[key].default, partial(self._moved, name, key))
                for key, setting in self.method.settings().items()
            }
            self._limit(name)
        return self._made[name]

    def read(self) -> Method:
        """The method that the controls describe. Raises `ValueError` for settings that do not go together."""
        chosen = {k: w.read() if isinstance(w, MethodControls) else w.value for k, w in self.settings.items()}
        said = {key: value for (name, key), value in self._said.items() if name == self.choice.value}
        return self.method(**chosen | said)

    def show(self, method: Method) -> None:
        """Set every control to `method`."""
        with self._silence():
            self.choice.value = type(method).__name__
            for name, widget in self.settings.items():
                value = getattr(method, name)
                if isinstance(widget, MethodControls):
                    widget.show(value)
                elif isinstance(widget, widgets.IntSlider) and not isinstance(value, int):
                    self._said[self.choice.value, name] = value
                    widget.description = f"{name}: {value}"
                else:
                    self._moved(self.choice.value, name)
                    _set(widget, value)
            self._arrange()

    def limit(self, tokens: int) -> None:
        """Counts of tokens need not go further than a sequence of `tokens` tokens, where all further ones mean the same."""
        self._tokens = tokens
        with self._silence():
            for name in self._made:
                self._limit(name)

    def _limit(self, name: str) -> None:
        if self._tokens is None:
            return
        for key, setting in methods(self.axis)[name].settings().items():
            widget = self._made[name][key]
            if isinstance(widget, MethodControls):
                widget.limit(self._tokens)
            elif isinstance(widget, widgets.IntSlider) and setting.unit == "tokens":
                limit_slider(widget, setting, self._tokens)

    def _moved(self, method: str, name: str) -> None:
        if self._said.pop((method, name), None) is not None:
            setting = methods(self.axis)[method].settings()[name]
            self._made[method][name].description = label_of(name, setting)
        self._changed()

    def _chosen(self, _: Any) -> None:
        self._arrange()
        self._changed()

    def _changed(self) -> None:
        if not self._quiet:
            self._tell()

    def _arrange(self) -> None:
        paper = html.escape(self.method.paper)
        self.source.value = f'<span class="kvlab-source">{paper}</span>' if paper else ""
        head = [widgets.HTML(html.escape(self.label))] if self.label else []
        self.children = (*head, self.choice, *self.settings.values(), *([self.source] if paper else []))

    @contextmanager
    def _silence(self) -> Any:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before


def limit_slider(widget: widgets.IntSlider, setting: Setting, tokens: int) -> None:
    """Let a slider of tokens end where a sequence of `tokens` is covered, or at its value if that is larger."""
    high = int(setting.high) if setting.high is not None else tokens
    step = widget.step
    widget.max = max(widget.value, min(high, -(-tokens // step) * step), widget.min + step)


def _set(widget: Any, value: Any) -> None:
    if isinstance(widget, widgets.SelectionSlider) and value not in widget.options:
        widget.options = sorted([*widget.options, value])
    elif isinstance(widget, widgets.IntSlider):
        widget.max, widget.min = max(widget.max, value), min(widget.min, value)
    widget.value = value


class StrategyControls(widgets.VBox):
    """A strategy's three axes, each in its hue, and the prefill chunk: `keep`, `store`, `place`, `chunk`."""

    def __init__(self, strategy: Strategy, changed: Changed) -> None:
        super().__init__()
        self._tell, self._quiet = changed, False
        self.keep, self.store, self.place = (MethodControls(axis, getattr(strategy, axis), self._changed) for axis in AXES)
        self._chunk_setting = Strategy.chunk_setting()
        self.chunk: Any = control("chunk", self._chunk_setting, 0, self._changed)
        boxes = []
        for axis in AXES:
            head = widgets.HTML(f'<div class="kvlab-axis" style="--hue:{HUES[axis]}"><b>{axis}</b> {QUESTIONS[axis]}</div>')
            boxes.append(widgets.VBox([head, getattr(self, axis)]).add_class(f"kvlab-{axis}").add_class("kvlab-box"))
        head = widgets.HTML(f'<div class="kvlab-axis" style="--hue:{style.FULL}"><b>prompt</b> in how many pieces?</div>')
        boxes.append(widgets.VBox([head, self.chunk]).add_class("kvlab-box"))
        self.children = tuple(boxes)
        self.show(strategy)

    def read(self) -> Strategy:
        """The strategy that the controls describe. Raises `ValueError` for what does not go together."""
        return Strategy(keep=self.keep.read(), store=self.store.read(), place=self.place.read(), chunk=self.chunk.value)

    def show(self, strategy: Strategy) -> None:
        """Set every control to `strategy`, silently."""
        before, self._quiet = self._quiet, True
        try:
            for axis in AXES:
                getattr(self, axis).show(getattr(strategy, axis))
            _set(self.chunk, strategy.chunk)
        finally:
            self._quiet = before

    def limit(self, tokens: int) -> None:
        """As `MethodControls.limit`, for all of them."""
        before, self._quiet = self._quiet, True
        try:
            for axis in AXES:
                getattr(self, axis).limit(tokens)
            limit_slider(self.chunk, self._chunk_setting, tokens)
        finally:
            self._quiet = before

    def _changed(self) -> None:
        if not self._quiet:
            self._tell()
