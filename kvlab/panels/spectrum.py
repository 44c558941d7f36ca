"""The spectrum: how many directions keys and values need, before RoPE and after, and what is lost where fewer are kept.

Spectrum()          # as the last line of a cell

Every control is a widget: a person moves it, a test or a notebook sets its `value` and calls `wait()`.
"""

from dataclasses import replace
from typing import Any

import ipywidgets as widgets
from torch import Tensor

from kvlab.lab import Lab, Progress
from kvlab.measure import inspect, spectra
from kvlab.panels.bench import LAYERS, Drawing, StoreBench, slider
from kvlab.panels.runner import Ticket
from kvlab.panels.widgets import control
from kvlab.plots import inspect as errors
from kvlab.plots import spectra as plots
from kvlab.store.base import Store
from kvlab.store.lowrank import STEP, LowRank

START = LowRank(rank=32, bits=16)
LONG = 16_384  # tokens: a text on which the basis weighs little
DRAWINGS = {
    "kept": Drawing("what the first directions keep", 400, lambda: plots.kept(None, title="")),
    "needed": Drawing("rank needed by layer", 230, lambda: plots.needed(None, title="")),
    LAYERS: Drawing("what is lost", 230, lambda: errors.layer_errors(None, title="")),
}
COLUMNS = (("kept",), ("needed", LAYERS))


class Spectrum(StoreBench):
    """One panel on one model and one text, which is read once.

    Controls: `layer`, `share` (of the variance, what the rank needed by layer is for); of the store `rank`, `bits`, `pre_rope` and `values`; `cancel`
    ends a run. `cards`, `figures`: by the names of `DRAWINGS`. `text` says all of it in words. `error.value` is empty when all is well. `shown` holds
    what is on show by name: "recorded", "store", "spectra" (of the layer), "ranks", "errors", "bits".

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        prompt: text, or ids `[1, n]`; None takes the reference text.
        store: where it starts; settings that have no control here stay as they are.
    """

    def __init__(self, lab: Lab | None = None, prompt: str | Tensor | None = None, store: LowRank | None = None) -> None:
        self._start = START if store is None else store
        self._spectra: tuple[int, tuple[spectra.Spectra, ...]] = (0, ())  # the first tokens left out, and every layer
        self.layer = slider("layer", "the layer that is looked into")
        self.share = widgets.FloatSlider(
            description="share of the variance to keep",
            tooltip="what the rank needed by layer is for",
            min=0.8,
            max=0.99,
            step=0.01,
            value=0.95,
            readout_format=".0%",
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"width": "auto"},
        ).add_class("kvlab-setting")
        declared, rank = LowRank.settings(), self._start.rank
        self.rank = slider(
            "rank (directions a head keeps)", declared["rank"].help, min=STEP, max=max(64, rank), step=STEP, value=rank
        )
        self.bits: Any = control("bits", declared["bits"], self._start.bits, self._changed)
        self.pre_rope: Any = control("pre_rope", declared["pre_rope"], self._start.pre_rope, self._changed)
        self.values: Any = control("values", declared["values"], self._start.values, self._changed)
        self.bits.description, self.values.description = "bits of a coefficient", "values, too"
        super().__init__(
            lab,
            prompt,
            question="which layer?",
            look=[self.layer, self.share],
            store=[self.rank, self.bits, self.pre_rope, self.values],
            drawings=DRAWINGS,
            columns=COLUMNS,
        )
        for choice in (self.layer, self.share, self.rank):
            choice.observe(lambda _: self._changed(), "value")
        self._changed()

    @property
    def store(self) -> LowRank:
        """What the controls say. Setting it sets the controls, and looks again."""
        own = {"rank": self.rank.value, "bits": self.bits.value, "pre_rope": self.pre_rope.value, "values": self.values.value}
        return replace(self._start, **own)

    @store.setter
    def store(self, store: LowRank) -> None:
        self._start, self._setting = store, True
        try:
            self.rank.max = max(self.rank.max, store.rank)
            self.rank.value, self.bits.value = store.rank, store.bits
            self.pre_rope.value, self.values.value = store.pre_rope, store.values
        finally:
            self._setting = False
        self._changed()

    def _read(self) -> LowRank:
        return self.store

    def _look(self, ticket: Ticket, recorded: inspect.Recorded, store: Store, progress: Progress) -> None:
        layer = self.layer.value
        store = self.store  # its rank may have been too high for this model's heads
        skip = min(
            store.sinks_exact, *(keys.shape[2] - 1 for keys, _ in recorded.layers)
        )  # they stay plain: no basis is made for them
        if not self._spectra[1] or self._spectra[0] != skip:
            self._spectra = (skip, spectra.every_layer(recorded, skip, progress))
        ticket.show(self._draw, self._spectra[1])
        here, there = (spectra.bits(recorded, store, layer, tokens) for tokens in (None, LONG))
        ticket.show(self.shown.update, bits=here)
        rows = recorded.layers[layer][0].shape[2]
        self._look_at_errors(ticket, recorded, store, layer, progress, plots.bits_summary(here, rows, there, LONG))

    # always under the runner's lock

    def _offer(self, recorded: inspect.Recorded) -> None:
        """Its layers and ranks; it begins in the middle."""
        last = len(recorded.layers) - 1
        self._set(self.layer, 0, last, min(12, last))
        dim = max(side.shape[3] for both in recorded.layers for side in both)
        high = max(STEP, dim // STEP * STEP)
        self._set(self.rank, STEP, high, min(self.rank.value, high))

    def _draw(self, made: tuple[spectra.Spectra, ...]) -> None:
        layer, rank, share = self.layer.value, self.rank.value, self.share.value
        one, every = made[layer], spectra.ranks(made, share)
        self.shown |= {"spectra": one, "ranks": every}
        plots.update_kept(self.figures["kept"], one, rank, share)
        plots.update_needed(self.figures["needed"], every, layer)
        self._say("kept", plots.kept_summary(one, rank), f"layer {layer}, all heads")
        self._say("needed", plots.needed_summary(every), f"for {100 * share:.3g}% of the variance")
