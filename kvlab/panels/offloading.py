"""Offloading: one decode step as it passes, while prefetch, hot tokens, tier, store and an emulated link are changed.

Offloading()          # as the last line of a cell

Every control is a widget: a person moves it, a test or a notebook sets its `value` and calls `wait()`.
"""

from typing import Any

import torch
from torch import Tensor

from kvlab import hardware
from kvlab.keep.everything import Everything
from kvlab.keep.quest import Quest
from kvlab.lab import Lab, Progress
from kvlab.measure import inspect
from kvlab.measure.moving import Layers, Moved, moved
from kvlab.panels.bench import Bench, Box, Drawing, slider
from kvlab.panels.runner import Ticket
from kvlab.panels.widgets import HUES, QUESTIONS, MethodControls
from kvlab.place.offload import Offload
from kvlab.place.resident import Resident
from kvlab.plots import style
from kvlab.plots import timeline as plots
from kvlab.strategy import Strategy

LINKS = ("NVMe SSD gen3 x4", "NVMe SSD gen4 x4", "NVMe SSD gen5 x4", "PCIe 3.0 x16", "PCIe 4.0 x16", "PCIe 5.0 x16")
DRAWINGS = {
    "step": Drawing("one decode step", 640, lambda: plots.step(None, title="")),
    "held": Drawing("bytes on the device", 240, lambda: plots.held(None, title="")),
    "links": Drawing("the same bytes over other links", 320, lambda: plots.links(0, {}, float("nan"), title="")),
}
COLUMNS = (("step",), ("held", "links"))


class Offloading(Bench):
    """One panel on one model and one text, which is read once; its keys and values, as often as `tokens` needs them, fill each cache.

    Controls: `tokens` in the cache, `pages` (per cent that a query reads; below 100 it is `keep.Quest`), `store` and `place` (each with `.choice` and
    `.settings[name]`); `cancel` ends a run. `cards`, `figures`: by the names of `DRAWINGS`. `text` says all of it in words. `error.value` is empty when
    all is well. `shown` holds "strategy", "moved" and "resident" (seconds of a step that has all bytes on the device), once there is one.

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        prompt: text, or ids `[1, n]`; None takes the reference text.
        strategy: where it starts.
        tokens: how many tokens the cache holds at first.
    """

    asked = "strategy"

    def __init__(
        self, lab: Lab | None = None, prompt: str | Tensor | None = None, strategy: Strategy | None = None, *, tokens: int = 1024
    ) -> None:
        start = Strategy(place=Offload()) if strategy is None else strategy
        self._recorded: inspect.Recorded | None = None
        self._baseline: dict[tuple[int, Strategy], float] = {}
        self.tokens = slider("tokens in the cache", "a text of its own length, repeated", min=64, max=8192, step=64, value=tokens)
        budget = start.keep.budget if isinstance(start.keep, Quest) and isinstance(start.keep.budget, float) else 1.0
        self.pages = slider(
            "pages read (%)", "below 100: only the best pages of each query come back (Quest)", min=5, max=100, step=5
        )
        self.pages.value = round(100 * budget)
        self.store = MethodControls("store", start.store, self._changed)
        self.place = MethodControls("place", start.place, self._changed)
        boxes = [
            Box("look at", "how long a text?", style.FULL, [self.tokens]),
            Box("place", QUESTIONS["place"], HUES["place"], [self.place]),
            Box("keep", "which pages are read?", HUES["keep"], [self.pages]),
            Box("store", QUESTIONS["store"], HUES["store"], [self.store]),
        ]
        super().__init__(lab, prompt, boxes=boxes, drawings=DRAWINGS, columns=COLUMNS)
        for choice in (self.tokens, self.pages):
            choice.observe(lambda _: self._changed(), "value")
        self._changed()

    @property
    def strategy(self) -> Strategy:
        """What the controls say. Raises `ValueError` for what does not go together. Setting it sets the controls, and measures."""
        return self._read()[0]

    @strategy.setter
    def strategy(self, strategy: Strategy) -> None:
        self._setting = True
        try:
            self.store.show(strategy.store)
            self.place.show(strategy.place)
            share = strategy.keep.budget if isinstance(strategy.keep, Quest) else 1.0
            self.pages.value = round(100 * share) if isinstance(share, float) else 100
        finally:
            self._setting = False
        self._changed()

    def _read(self) -> tuple[Strategy, int]:
        share = self.pages.value
        keep: Any = Everything() if share == 100 else Quest(budget=share / 100)
        return Strategy(keep=keep, store=self.store.read(), place=self.place.read()), self.tokens.value

    def _answer(self, ticket: Ticket, lab: Lab, asked: tuple[Strategy, int], progress: Progress) -> None:
        strategy, tokens = asked
        if self._recorded is None:
            recorded = inspect.record(lab, self._prompt, progress)
            ticket.show(self._meet, recorded, lab)
        assert self._recorded is not None
        tokens = min(tokens, lab.context - 16)
        layers = repeated(self._recorded.layers, tokens)
        stays = Strategy(keep=strategy.keep, store=strategy.store, place=Resident())
        made = moved(lab, strategy, layers, steps=5, progress=progress)
        ticket.show(self._show, made)
        resident = self._baseline.get((tokens, stays))
        if resident is None:
            resident = moved(lab, stays, layers, steps=5, progress=progress).step
            self._baseline[tokens, stays] = resident
        ticket.show(self._compare, made, resident)

    # always under the runner's lock

    def _meet(self, recorded: inspect.Recorded, lab: Lab) -> None:
        self._recorded = recorded
        self._name(recorded.tokens)
        high = max(64, (lab.context - 16) // 64 * 64)
        self._set(self.tokens, 64, high, min(self.tokens.value, high))
        self.place.limit(high)

    def _show(self, made: Moved) -> None:
        assert self._recorded is not None
        place, line = made.strategy.place, made.line
        self.shown |= {"strategy": made.strategy, "moved": made}
        self.shown.pop("resident", None)  # that of another setting
        full = sum(2 * made.tokens * k.shape[1] * (k.shape[3] + v.shape[3]) for k, v in self._recorded.layers)
        emulated = 1e9 * getattr(place, "emulate", 0.0)
        predicted = {name: hardware.transfer_time(made.bytes, name) for name in LINKS}
        plots.update_step(self.figures["step"], line)
        plots.update_held(self.figures["held"], made, full)
        plots.update_links(self.figures["links"], made.bytes, predicted, line.bandwidth, emulated)
        self._say("step", plots.step_summary(made), "")
        self.cards["step"].mark("waiting", "measured; now the same with all bytes here …")
        self._say("held", plots.held_summary(made), "measured")
        self._say(
            "links", plots.links_summary(made.bytes, predicted, line.bandwidth, emulated), "predicted by datasheets, and here"
        )

    def _compare(self, made: Moved, resident: float) -> None:
        """The sentence that needs the step of the cache that stays."""
        self.shown["resident"] = resident
        label = "an emulated link" if getattr(made.strategy.place, "emulate", 0.0) else "measured"
        self._say("step", plots.step_summary(made, resident), f"{label}, {made.tokens:,} tokens")


def repeated(layers: Layers, tokens: int) -> Layers:
    """Keys and values of exactly ``tokens`` tokens, the text's over and over."""

    def side(x: Tensor) -> Tensor:
        return torch.cat([x] * -(-tokens // x.shape[2]), 2)[:, :, :tokens]

    return [(side(keys), side(values)) for keys, values in layers]
