"""The block table, alive: requests on the real model, and after every step who owns which block, what is shared, copied and wasted, and what the tree knows.

BlockTable()          # as the last line of a cell

All steps stay: `step` goes back and forth through them, also while the engine goes on.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import ipywidgets as widgets

from kvlab.lab import Lab, Progress
from kvlab.panels.bench import Bench, Box, Drawing, dropdown, slider, start, stops
from kvlab.panels.runner import Ticket
from kvlab.panels.widgets import HUES
from kvlab.plots import serving as plots
from kvlab.plots import style
from kvlab.serving.engine import Engine, block_bytes
from kvlab.serving.frames import Coming, Frame, watched
from kvlab.serving.request import Sampling
from kvlab.store.int import Int
from kvlab.strategy import Strategy
from kvlab.texts import reference_text

DRAWINGS = {
    "table": Drawing("block table", 430, lambda: plots.block_table(title="")),
    "tree": Drawing("prefix tree", 250, lambda: plots.prefix_tree(title="")),
    "steps": Drawing("who runs in which step", 340, lambda: plots.timeline(unit="step", title="")),
    "filling": Drawing("blocks in use", 240, lambda: plots.filling(title="")),
}
COLUMNS = (("table", "tree"), ("steps", "filling"))
BITS = {"as the model holds them": 0, "8 bits": 8, "4 bits": 4}
MOST = 600  # steps: a panel is looked at


class Asked(NamedTuple):
    block_size: int
    memory: int  # tokens, as the model holds them
    bits: int
    requests: int
    every: int
    prefix: int
    own: int
    new: int
    answers: int
    sharing: bool
    batching: str
    reserve: str
    preempt: str


class BlockTable(Bench):
    """Driven by `block_size`, `memory`, `bits`; `requests`, `every`, `prefix`, `own`, `new`, `answers`; `sharing`, `batching`, `reserve`, `preempt`; `step` looks
    at one step. `shown` holds "frames". `cards`, `figures`: by the names of `DRAWINGS`.

    Args:
        lab: the model; None loads SmolLM2-135M in the background, once the panel is there.
        settings: what the controls start with, by their names. Raises ``ValueError`` for a name or value that they do not have.
    """

    asked = "frames"

    def __init__(self, lab: Lab | None = None, **settings: Any) -> None:
        self.block_size = stops("block size (tokens)", (2, 4, 8, 16, 32, 64), 8, "tokens of a block")
        self.memory = stops(
            "memory (tokens)", (64, 128, 256, 384, 512, 768, 1024, 2048), 384, "so many tokens fit, as the model holds them"
        )
        self.bits = dropdown("a full block holds", BITS, 0, "codes take less room, so there are more blocks in the same memory")
        self.requests = slider("requests", "how many come", min=1, max=8, value=6)
        self.every = slider("steps between arrivals", "0: all of them are there from the start", min=0, max=12, value=3)
        self.prefix = slider("shared beginning (tokens)", "what all of them begin with", min=0, max=128, value=36)
        self.own = slider(
            "own text (tokens)", "what each asks beside it, from half to one and a half times as much", min=2, max=96, value=20
        )
        self.new = slider(
            "new tokens", "how long the answers are, from half to one and a half times as long", min=1, max=64, value=20
        )
        self.answers = slider(
            "answers to each", "further ones share the blocks of the first, until they write", min=1, max=3, value=1
        )
        self.sharing = widgets.Checkbox(
            description="prefix caching", value=True, indent=False, tooltip="lend out again what was read before"
        )
        self.sharing.add_class("kvlab-setting")
        self.batching = dropdown(
            "batching", {"continuous": "continuous", "static": "static"}, "continuous", "who may join, and when"
        )
        self.reserve = dropdown(
            "set aside", {"blocks, as needed": "blocks", "the worst case": "worst"}, "blocks", "when a request is let in"
        )
        self.preempt = dropdown(
            "who makes room",
            {"computes again": "recompute", "is put away": "swap"},
            "recompute",
            "the youngest request, where blocks run out",
        )
        self.step = slider("step", "look at an earlier step", min=0, max=1, value=0)
        self.play = widgets.Play(value=0, min=0, max=1, interval=400, tooltip="play the steps")
        self._controls = {name: getattr(self, name) for name in Asked._fields}
        start(self, self._controls, settings)
        boxes = [
            Box("look at", "which step?", style.FULL, [self.step, self.play]),
            Box("blocks", "how much memory?", HUES["store"], [self.block_size, self.memory, self.bits]),
            Box(
                "requests",
                "who asks for what?",
                HUES["keep"],
                [self.requests, self.every, self.prefix, self.own, self.new, self.answers],
            ),
            Box("rules", "who gets what?", HUES["place"], [self.sharing, self.batching, self.reserve, self.preempt]),
        ]
        self._frames: list[Frame] = []
        super().__init__(lab, None, boxes=boxes, drawings=DRAWINGS, columns=COLUMNS)
        for name in ("table", "tree"):  # no labels on the left
            self.figures[name].update_layout(margin={"l": 10})
        for one in self._controls.values():
            one.observe(lambda _: self._changed(), "value")
        self.step.observe(lambda _: self._moved(), "value")
        widgets.jslink((self.play, "value"), (self.step, "value"))
        self._changed()

    @property
    def frames(self) -> Sequence[Frame]:
        """Of all steps so far."""
        return tuple(self._frames)

    def _read(self) -> Asked:
        return Asked(**{name: control.value for name, control in self._controls.items()})

    # on the runner's thread

    def _answer(self, ticket: Ticket, lab: Lab, asked: Asked, progress: Progress) -> None:
        strategy = Strategy()
        if asked.bits:
            group = min(64, *(min(layer.key_dim, layer.value_dim) for layer in lab.geometry.kv_layers))
            strategy = Strategy(store=Int(bits=asked.bits, key_axis="token", group_size=group))
        engine = Engine(
            lab, strategy, kv_memory=int(asked.memory * block_bytes(lab, Strategy(), 1)), block_size=asked.block_size, prefix_caching=asked.sharing,
            batching=asked.batching, reserve=asked.reserve, preempt=asked.preempt, token_budget=64, max_running=len(plots.NAMES),
        )  # fmt: skip
        coming = _coming(asked, lab.encode_long(reference_text())[0].tolist())
        ticket.show(self._begin, lab, asked, engine.pool.blocks)
        for now in watched(engine, coming, MOST):
            progress("serving", now.number, now.number + len(now.running) + 4 * len(now.later) + asked.new // 2)
            ticket.show(self._add, lab, now)
        ticket.show(self._finish, lab)

    # always under the runner's lock

    def _begin(self, lab: Lab, asked: Asked, blocks: int) -> None:
        self._frames = []
        self.shown.pop("frames", None)
        self.model.value = f"{lab.name}, {blocks} blocks of {asked.block_size} tokens"
        self._set(self.step, 0, 1, 0)

    def _add(self, lab: Lab, now: Frame) -> None:
        """Whoever looks at the newest step goes on with it."""
        newest = not self._frames or self.step.value >= self._frames[-1].number
        self._frames.append(now)
        self.play.max = now.number
        self._set(self.step, 1, max(2, now.number), now.number if newest else max(1, self.step.value))
        if newest:
            self._draw(lab)

    def _finish(self, lab: Lab) -> None:
        self.shown["frames"] = self.frames
        self._draw(lab)

    def _moved(self) -> None:
        with self.runner.lock:
            if self._frames and self._lab is not None and not self._setting:
                self._draw(self._lab)

    def _draw(self, lab: Lab) -> None:
        at = min(max(self.step.value, 1), len(self._frames))
        now, note = self._frames[at - 1], f"step {at} of {len(self._frames)}"
        plots.update_block_table(self.figures["table"], now)
        self._say("table", plots.block_table_summary(now), note)
        plots.update_prefix_tree(self.figures["tree"], now.nodes, lab.tokenizer.decode)
        tree = (
            plots.prefix_tree_summary(now.nodes, now.block_size) if self.sharing.value else "No tree: nothing is lent out again."
        )
        self._say("tree", tree, note)
        plots.update_timeline(self.figures["steps"], plots.spans_of_frames(self._frames), now=at - 0.5)
        self._say("steps", plots.steps_summary(self._frames), f"{len(self._frames)} steps")
        plots.update_filling(self.figures["filling"], self._frames, at)
        self._say("filling", plots.filling_summary(self._frames), f"{len(self._frames)} steps")

    def _repr_mimebundle_(self, **settings: Any) -> dict[str, Any]:
        if os.environ.get("KVLAB_PICTURES") == "1" and self.wait() and self._frames:  # a picture shows one step: the fullest
            self.step.value = max(self._frames, key=lambda now: sum(len(block.readers) for block in now.blocks)).number
        return super()._repr_mimebundle_(**settings)

    def __repr__(self) -> str:
        if not self._frames:
            return "BlockTable: nothing served yet"
        return f"BlockTable: {len(self._frames)} steps\n{self.text}"


def _coming(asked: Asked, ids: list[int]) -> dict[str, Coming]:
    """Requests with a beginning in common; their own texts and answers are a half to one and a half times as long as asked."""
    found = {}
    for number in range(asked.requests):
        names = plots.NAMES[number * asked.answers : (number + 1) * asked.answers]
        share = 0.5 + (number * 5 % 7) / 6
        own, new = max(1, round(share * asked.own)), max(1, round((2 - share) * asked.new))
        start = 1000 + 131 * number
        dice = [
            Sampling(max_new_tokens=new, ignore_eos=True, temperature=float(asked.answers > 1), seed=seed)
            for seed in range(asked.answers)
        ]
        prompt = [*ids[: asked.prefix], *ids[start : start + own]]
        found[names[0]] = Coming(number * asked.every, prompt, dice[0], dict(zip(names[1:], dice[1:], strict=True)))
    return found
