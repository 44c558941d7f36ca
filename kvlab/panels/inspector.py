"""The inspector: single keys and values of a real model, as it made them and as a store gives them back.

Inspector()          # as the last line of a cell

Every control is a widget: a person moves it, a test or a notebook sets its `value` and calls `wait()`.
"""

from typing import Any

import ipywidgets as widgets
from torch import Tensor

from kvlab.lab import Lab, Progress
from kvlab.measure import inspect
from kvlab.panels.bench import LAYERS, Drawing, StoreBench, slider
from kvlab.panels.runner import Ticket
from kvlab.panels.widgets import MethodControls
from kvlab.plots import inspect as plots
from kvlab.store.base import Store
from kvlab.store.int import Int

START = Int(bits=4)
DRAWINGS = {
    "token": Drawing("one token", 430, lambda: plots.token(None, 0, title="")),
    "channels": Drawing("how large each channel is", 300, lambda: plots.channels(None, 0, title="")),
    "channel": Drawing("one channel over the tokens", 280, lambda: plots.channel(None, title="")),
    LAYERS: Drawing("error by layer", 230, lambda: plots.layer_errors(None, title="")),
    "bits": Drawing("bits a number", 220, lambda: plots.bits({}, {}, title="")),
}
COLUMNS = (("token", "channels"), ("channel", LAYERS, "bits"))


class Inspector(StoreBench):
    """One panel on one model and one text, which is read once.

    Controls: `what` ("keys" or "values"), `layer`, `head` (a KV head), `token`, `channel`; `controls` is the store, with `.choice` and
    `.settings[name]`; `cancel` ends a run. `cards`, `figures`: by the names of `DRAWINGS`. `text` says all of it in words. `error.value` is
    empty when all is well. `shown` holds what is on show by name: "recorded", "store", "written", "errors", "token", "channels", "channel".

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        prompt: text, or ids `[1, n]`; None takes the reference text.
        store: where it starts.
    """

    def __init__(self, lab: Lab | None = None, prompt: str | Tensor | None = None, store: Store | None = None) -> None:
        self._written: inspect.Written | None = None
        self.what: Any = widgets.ToggleButtons(
            options=inspect.SIDES,
            value="keys",
            tooltips=["the keys of the head", "its values"],
            style={"description_width": "initial", "button_width": "auto"},
            layout={"width": "auto", "margin": "6px 0 2px"},
        ).add_class("kvlab-setting")
        self.layer = slider("layer", "the layer that is looked into")
        self.head = slider("KV head", "the KV head; several query heads may share it")
        self.token = slider("token", "the token, counted from 0")
        self.channel = slider("channel", "one of the numbers of a key or value; at the start the largest one")
        self.controls = MethodControls("store", START if store is None else store, self._changed)
        look = [self.what, self.layer, self.head, self.token, self.channel]
        super().__init__(
            lab,
            prompt,
            question="which number?",
            look=look,
            store=[self.controls],
            drawings=DRAWINGS,
            columns=COLUMNS,
        )
        for choice in look:
            choice.observe(lambda _: self._changed(), "value")
        self._changed()

    @property
    def store(self) -> Store:
        """What the controls say. Raises `ValueError` where they do not go together. Setting it sets the controls, and looks again."""
        return self._read()

    @store.setter
    def store(self, store: Store) -> None:
        self.controls.show(store)
        self._changed()

    def _read(self) -> Store:
        made = self.controls.read()
        assert isinstance(made, Store)
        return made

    def _look(self, ticket: Ticket, recorded: inspect.Recorded, store: Store, progress: Progress) -> None:
        layer, written = self.layer.value, self._written
        if written is None or (written.layer, written.store) != (layer, store):
            written = inspect.write(recorded, store, layer)
        ticket.show(self._offer_layer, written)
        ticket.show(self._draw, written)
        self._look_at_errors(ticket, recorded, store, layer, progress)

    # always under the runner's lock

    def _offer(self, recorded: inspect.Recorded) -> None:
        """Its layers and tokens; it begins in the middle."""
        self.controls.limit(recorded.tokens)
        last = len(recorded.layers) - 1
        self._set(self.layer, 0, last, min(12, last))
        keys = recorded.layers[self.layer.value][0]
        self._set(self.head, 0, keys.shape[1] - 1, 0)
        first, rows = recorded.first[self.layer.value], keys.shape[2]
        self._set(self.token, first, first + rows - 1, first + rows // 2)
        self._set(self.channel, 0, keys.shape[3] - 1, int(keys[0, 0].abs().amax(0).argmax()))

    def _offer_layer(self, written: inspect.Written) -> None:
        """The heads, tokens and channels of this layer; a value that is none of them moves to the nearest."""
        self._written = self.shown["written"] = written
        heads, rows, dim = written.side(self.what.value).exact.shape
        for choice, low, count in ((self.head, 0, heads), (self.token, written.first, rows), (self.channel, 0, dim)):
            high = low + count - 1
            if (choice.min, choice.max) != (low, high):
                self._set(choice, low, high, min(max(choice.value, low), high))

    def _draw(self, written: inspect.Written) -> None:
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
