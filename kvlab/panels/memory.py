"""The memory calculator: choose a model, a length, requests and a device, and see what fits."""

import base64
import html
import os
import threading
import traceback
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from kvlab import geometry, hardware
from kvlab.panels.drawing import Figure, library
from kvlab.plots import memory, style

GROUP = 32  # numbers that share a scale; it divides every head dim of the table
CONTEXTS = [2**power for power in range(9, 21)]


def widget(fig: go.Figure) -> go.FigureWidget:
    """The figure as a widget that takes the width it is given and follows the window."""
    live = Figure(fig)
    live.layout.autosize = True
    live._config = {"responsive": True, "displaylogo": False}  # no public way to give a FigureWidget its configuration
    return live


class Pictured(widgets.VBox):
    """A box with a `figure` and its line of text, `summary`; with KVLAB_PICTURES=1 (saving for readers) also a picture."""

    figure: go.FigureWidget
    summary: widgets.HTML

    def __init__(self, children: Sequence[widgets.Widget] = ()) -> None:
        super().__init__(list(children))
        self.add_class("kvlab-figure")

    def _repr_mimebundle_(self, **settings: Any) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(**settings)
        if os.environ.get("KVLAB_PICTURES") == "1":
            picture = self.figure.to_image("png", width=800, height=self.figure.layout.height)
            bundle |= {"image/png": base64.b64encode(picture).decode(), "text/plain": html.unescape(self.summary.value)}
        return bundle


def captioned(fig: go.Figure, summary: str) -> Pictured:
    """A figure with its one line of text under it, for the end of a cell."""
    box = Pictured()
    box.figure, box.summary = widget(fig), widgets.HTML(html.escape(summary))
    box.children = (box.figure, box.summary, library())
    return box


class MemoryCalculator(Pictured):
    """Predicted memory of one model, of the table or your own (`geometry.find`), on one kind of device, stacked against its capacity.

    Driven by the `value` of `model`, `kv_heads`, `context` (tokens in each request), `batch` (sequences in a request),
    `requests`, `bits` (of the KV cache; below 16 with scales and zero points in groups of 32), `weight_bits`, `hardware` and
    `devices`. `figure` is a FigureWidget, updated in place; `summary.value` says it in words, `error.value` what went wrong.
    """

    def __init__(self, model: str = "Llama-3.1-8B", hardware_name: str = "H100 SXM 80GB", context: int = 131072) -> None:
        names = geometry.names()
        if model not in names:
            geometry.find(model)  # what is wrong with it is said here
            names = [model, *names]
        self.model = _labelled(widgets.Dropdown, "model", options=names, value=model)
        self.kv_heads = _labelled(widgets.SelectionSlider, "KV heads", options=[1])
        lengths = [(f"{tokens:,}", tokens) for tokens in CONTEXTS]
        self.context = _labelled(widgets.SelectionSlider, "context (tokens)", options=lengths, value=context)
        self.batch = _labelled(widgets.IntSlider, "batch (sequences in a request)", min=1, max=64, value=1)
        self.requests = _labelled(widgets.IntSlider, "requests at once", min=1, max=256, value=1)
        self.bits = _labelled(widgets.Dropdown, "KV bits", options=[16, 8, 4, 3, 2], value=16)
        self.weight_bits = _labelled(widgets.Dropdown, "weight bits", options=[16, 8, 4], value=16)
        self.hardware = _labelled(widgets.Dropdown, "hardware", options=hardware.names("gpu", "cpu"), value=hardware_name)
        self.devices = _labelled(widgets.IntSlider, "devices", min=1, max=16, value=1)
        self.figure = widget(style.layout(go.Figure(), "Does it fit?", "tokens in each request", "memory", height=420))
        self.summary = widgets.HTML()
        self.error = widgets.HTML()
        self._lock = threading.RLock()
        self._settling = False  # controls are being changed by another control
        self._choices = (
            self.kv_heads, self.context, self.batch, self.requests, self.bits, self.weight_bits, self.hardware, self.devices,
        )  # fmt: skip
        controls = widgets.GridBox(
            [self.model, *self._choices],
            layout=widgets.Layout(grid_template_columns="repeat(auto-fit, minmax(300px, 1fr))", grid_gap="2px 16px"),
        )
        super().__init__([controls, self.error, self.figure, self.summary, library()])
        self._new_model()
        self.model.observe(self._new_model, "value")
        for control in self._choices:
            control.observe(self._update, "value")

    def _new_model(self, _: Any = None) -> None:
        """Offer the KV heads that the model could have, its own chosen."""
        with self._lock:
            shape = geometry.find(self.model.value)
            choices = shape.head_choices or (shape.kv_heads,)
            self._settling = True
            self.kv_heads.options = choices
            self.kv_heads.value = shape.kv_heads
            self.kv_heads.disabled = len(choices) == 1
            self._settling = False
            self._update()

    def _update(self, _: Any = None) -> None:
        with self._lock:  # one at a time; each reads the newest values, so the last one wins
            if self._settling:
                return
            try:
                self._draw()
            except Exception as problem:
                folded = html.escape(traceback.format_exc())
                self.error.value = (
                    f'<span style="color:{style.DANGER}">{html.escape(str(problem))}; the figure below is stale</span>'
                    f"<details><summary>traceback</summary><pre>{folded}</pre></details>"
                )
            else:
                self.error.value = ""

    def _draw(self) -> None:
        shape, device = geometry.find(self.model.value), hardware.find(self.hardware.value)
        if shape.head_choices:
            shape = shape.with_kv_heads(self.kv_heads.value)
        here, count, capacity = self.context.value, self.devices.value, device.capacity(self.devices.value)
        load = {"batch": self.batch.value, "requests": self.requests.value, "weight_bits": self.weight_bits.value}
        store = {"bits": self.bits.value, "group_size": None if self.bits.value == 16 else GROUP}
        grid = geometry.grid(max(here, min(shape.context or CONTEXTS[-1], CONTEXTS[-1])), include=[here])
        fits = geometry.max_tokens(shape, capacity, **load, **store)
        memory.update_scale_up(
            self.figure,
            grid,
            geometry.curve(shape, grid, **load, **store),
            capacity,
            full=geometry.curve(shape, grid, **load),
            fits=fits,
            here=here,
            title=f"{shape.name} on {count} x {device.name}",
        )
        predicted = geometry.breakdown(shape, here, **load, **store)
        step = hardware.decode_time(shape, device, here, devices=count, **load, **store)
        first = memory.scale_up_summary(predicted, capacity, here, self.requests.value, fits=fits)
        lines = [f"{first}.", f"One decode step, {step}."]
        if shape.context and here > shape.context:
            lines.append(f"{shape.name} was made for {shape.context:,} tokens.")
        self.summary.value = html.escape(" ".join(lines))


def _labelled(kind: type[widgets.Widget], label: str, **settings: Any) -> Any:
    """A control with its whole label in front; a slider reports when it is released."""
    if issubclass(kind, widgets.IntSlider | widgets.SelectionSlider):
        settings["continuous_update"] = False
    return kind(description=label, style={"description_width": "initial"}, layout=widgets.Layout(width="auto"), **settings)
