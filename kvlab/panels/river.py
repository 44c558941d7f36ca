"""The token river: what becomes of every token of a text, when each head lets it go and why, and how much attention that costs.

TokenRiver()          # as the last line of a cell

Every control is a widget: a person moves it, a test or a notebook sets its `value` and calls `wait()`.
"""

from dataclasses import replace

from torch import Tensor

from kvlab.keep.heavy_hitter import HeavyHitter
from kvlab.lab import Lab, Progress
from kvlab.measure.river import Attended, River, attended, river
from kvlab.panels.bench import Bench, Box, Drawing, slider
from kvlab.panels.runner import Ticket
from kvlab.panels.widgets import HUES, QUESTIONS, MethodControls
from kvlab.plots import river as plots
from kvlab.plots import style
from kvlab.strategy import Strategy

START = HeavyHitter(budget=128, recent=32)
REMEMBERED = 8  # runs, so that going back takes no time
SHORT = 640  # tokens up to which the full cache's attention is kept: 150 MB for SmolLM2
DRAWINGS = {
    "flow": Drawing("token river", 660, lambda: plots.flow(None, title="")),
    "lost": Drawing("attention on what is gone", 230, lambda: plots.lost(None, title="")),
    "survival": Drawing("what each head still sees", 190, lambda: plots.survival(None, title="")),
    "overlap": Drawing("which layers hold alike", 330, lambda: plots.overlap(None, title="")),
}
COLUMNS = (("flow",), ("lost", "survival", "overlap"))


class TokenRiver(Bench):
    """One panel on one model and one text, which each choice of a keep reads again.

    Controls: `token` chooses one; `controls` is the keep, with `.choice` and `.settings[name]`; `cancel` ends a run. `cards`, `figures`: by the names of
    `DRAWINGS`. `text` says all of it in words. `error.value` is empty when all is well. `shown` holds "strategy" and "river", once there is one.

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        prompt: text, or ids `[1, n]`; None takes the reference text.
        strategy: where it starts; all but its keep stays as it is.
        prefill: how many tokens are read at once in the beginning; None: a quarter of the text. The others are read 16 at a time.
    """

    asked = "strategy"

    def __init__(
        self,
        lab: Lab | None = None,
        prompt: str | Tensor | None = None,
        strategy: Strategy | None = None,
        *,
        prefill: int | None = None,
    ) -> None:
        self._start = Strategy(keep=START) if strategy is None else strategy
        self._prefill = prefill
        self._ids: Tensor | None = None
        self._full: Attended | None = None
        self._runs: dict[Strategy, River] = {}  # the newest last
        self._drawn: River | None = None  # as far as it has been read
        self.token = slider("token", "the token, counted from 0: who let it go, and why")
        self.controls = MethodControls("keep", self._start.keep, self._changed)
        boxes = [
            Box("look at", "which token?", style.FULL, [self.token]),
            Box("keep", QUESTIONS["keep"], HUES["keep"], [self.controls]),
        ]
        super().__init__(lab, prompt, boxes=boxes, drawings=DRAWINGS, columns=COLUMNS)
        self.token.observe(lambda _: self._moved(), "value")
        self._changed()

    @property
    def strategy(self) -> Strategy:
        """What the controls say. Raises `ValueError` for what does not go together. Setting it sets the controls, and reads the text."""
        return self._read()

    @strategy.setter
    def strategy(self, strategy: Strategy) -> None:
        self._start = strategy
        self.controls.show(strategy.keep)
        self._changed()

    def _read(self) -> Strategy:
        return replace(self._start, keep=self.controls.read())

    def _answer(self, ticket: Ticket, lab: Lab, asked: Strategy, progress: Progress) -> None:
        if self._ids is None:
            ids = lab.encode(self._prompt) if isinstance(self._prompt, str) else self._prompt.to(lab.device)
            ticket.show(self._meet, ids)
        assert self._ids is not None
        made = self._runs.get(asked)
        if made is None:
            prefill = max(1, self._ids.shape[1] // 4) if self._prefill is None else self._prefill
            if self._full is None and 1 < self._ids.shape[1] <= SHORT:
                self._full = attended(lab, self._ids, prefill=prefill, progress=progress)
            made = river(
                lab, asked, self._ids, prefill=prefill, progress=progress, full=self._full,
                part=lambda made: ticket.show(self._show_part, made),
            )  # fmt: skip
        ticket.show(self._show, made)

    # always under the runner's lock

    def _meet(self, ids: Tensor) -> None:
        """Its tokens; it begins with one that is read soon after the prefill."""
        self._ids, n = ids, ids.shape[1]
        self._name(n)
        self.controls.limit(n)
        self._set(self.token, 0, max(1, n - 1), n // 4 + n // 32)

    def _show(self, made: River) -> None:
        self._runs.pop(made.strategy, None)
        self._runs[made.strategy] = made
        for old in list(self._runs)[:-REMEMBERED]:
            del self._runs[old]
        self.shown |= {"strategy": made.strategy, "river": made}
        plots.update_lost(self.figures["lost"], made)
        plots.update_overlap(self.figures["overlap"], made)
        plots.update_survival(self.figures["survival"], made, self.token.value)
        self._say("flow", self._draw_flow(made), str(made.strategy))
        self._say("lost", plots.lost_summary(made), "mean of all heads")
        self._say("survival", plots.survival_summary(made), "in the end")
        self._say("overlap", plots.overlap_summary(made), "in the end")

    def _show_part(self, made: River) -> None:
        """What has been read so far: the two figures that grow with it."""
        plots.update_lost(self.figures["lost"], made)
        for name, words in (("flow", self._draw_flow(made)), ("lost", plots.lost_summary(made))):
            self._say(name, words, "")
            self.cards[name].mark("waiting", f"so far: {made.tokens:,} tokens")

    def _moved(self) -> None:
        """Another token of the same river: nothing is read again, and a run that is under way goes on."""
        with self.runner.lock:
            if self._drawn is not None and not self._setting:
                self.cards["flow"].say(self._draw_flow(self._drawn))
                if "river" in self.shown:
                    plots.update_survival(self.figures["survival"], self.shown["river"], self.token.value)

    def _draw_flow(self, made: River) -> str:
        """Its line of words, and what became of the token, once it has been read."""
        self._drawn = made
        token = self.token.value if self.token.value < made.tokens else None
        plots.update_flow(self.figures["flow"], made, token)
        words = plots.flow_summary(made)
        return words if token is None else f"{words}\n\n{plots.why(made, token)}"
