"""Blind test: the same text continued with the full cache and with a strategy. Which is which? Votes are kept, and chance stands beside them.

BlindTest(lab, strategy)          # as the last line of a cell
"""

import datetime
import html
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets as widgets

from kvlab.keep.heavy_hitter import HeavyHitter
from kvlab.lab import Lab, Progress
from kvlab.panels.bench import Bench, Box, Drawing, slider
from kvlab.panels.runner import Ticket
from kvlab.panels.views import Card
from kvlab.panels.widgets import HUES, QUESTIONS, MethodControls
from kvlab.plots import choosing as plots
from kvlab.plots import style
from kvlab.store.int import Int
from kvlab.strategy import Strategy
from kvlab.texts import long_text

DRAWINGS = {"votes": Drawing("told apart?", 240, lambda: plots.votes(0, 0, title=""))}


class Round(NamedTuple):
    """Two continuations of one text. ``first_is_full``: A is the full cache's. ``same``: nobody can tell them apart, and no vote is taken."""

    number: int
    text: str
    full: str
    other: str
    strategy: Strategy
    first_is_full: bool

    @property
    def same(self) -> bool:
        return self.full == self.other


class BlindTest(Bench):
    """Driven by `keep`, `store` (each with `.choice` and `.settings`), `tokens` of text, `new_tokens` to go on with, and the buttons `a`, `b` (which is the full
    cache's?) and `skip`. `votes` are those of this strategy, also of earlier sessions; `texts` shows the round, `verdict` what the last vote was.

    Args:
        lab: the model; None loads SmolLM2-135M in the background.
        strategy: what the full cache is compared with, keep and store of it.
        prompt: a text whose stretches are continued; None takes the Python reference.
        out: the JSON-lines file of votes; None takes `votes.jsonl` in the working directory.
        seed: of the order in which the two stand.
    """

    asked = "round"

    def __init__(
        self,
        lab: Lab | None = None,
        strategy: Strategy | None = None,
        prompt: str | None = None,
        *,
        out: str | Path | None = None,
        seed: int | None = None,
    ) -> None:
        start = Strategy(HeavyHitter(budget=96, recent=32), Int(bits=4)) if strategy is None else strategy
        self._text = long_text() if prompt is None else prompt
        self.path = Path(out) if out is not None else Path("votes.jsonl")
        self._dice, self._number = random.Random(seed), 0
        self.keep, self.store = (MethodControls(axis, getattr(start, axis), self._changed) for axis in ("keep", "store"))
        self.tokens = slider("tokens of text", "how much is read before it goes on", min=64, max=1024, step=64, value=256)
        self.new_tokens = slider("tokens to go on with", "how much there is to judge by", min=8, max=96, step=8, value=32)
        self.a, self.b, self.skip = (
            widgets.Button(description=words, tooltip=tip, disabled=True)
            for words, tip in (
                ("A is the full cache", "vote for A"),
                ("B is the full cache", "vote for B"),
                ("Next text", "another text, no vote"),
            )
        )
        self.texts, self.verdict = widgets.HTML(), widgets.HTML()
        boxes = [
            Box("text", "how long?", style.FULL, [self.tokens, self.new_tokens]),
            Box("keep", QUESTIONS["keep"], HUES["keep"], [self.keep]),
            Box("store", QUESTIONS["store"], HUES["store"], [self.store]),
        ]
        super().__init__(lab, prompt, boxes=boxes, drawings=DRAWINGS, columns=(("votes",),))
        row = widgets.HBox([self.a, self.b, self.skip]).add_class("kvlab-row")
        self.cards = {"round": Card("which is the full cache?", [self.texts, row, self.verdict]), **self.cards}
        self.placed[0].children = (self.cards["round"], *self.placed[0].children)
        for choice in (self.tokens, self.new_tokens):
            choice.observe(lambda _: self._changed(), "value")
        self.a.on_click(lambda _: self.vote(True))
        self.b.on_click(lambda _: self.vote(False))
        self.skip.on_click(lambda _: self._next())
        self._changed()

    @property
    def votes(self) -> list[dict[str, Any]]:
        """The votes on the strategy that is shown. Raises ``ValueError`` naming a line of the file that is no vote."""
        made: Round | None = self.shown.get("round")
        wanted = None if made is None else made.strategy.to_dict()
        return [vote for vote in self._all() if vote["settings"] == wanted]

    def _all(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        found = []
        for number, line in enumerate(self.path.read_text(encoding="utf-8").rstrip("\n").split("\n"), 1):
            try:
                vote = json.loads(line)
                found.append({"settings": dict(vote["settings"]), "right": bool(vote["right"])} | vote)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{self.path}: line {number} is no vote: {error}") from error
        return found

    def vote(self, first_is_full: bool) -> None:
        """Say that A (or B) is the full cache's, and go on to the next text."""
        with self.runner.lock:
            made: Round | None = self.shown.get("round")
            if made is None or made.same or self.a.disabled:
                return
            right = made.first_is_full == first_is_full
            line = {
                "settings": made.strategy.to_dict(), "right": right, "text": made.text, "full": made.full, "other": made.other,
                "model": "" if self._lab is None else self._lab.name, "date": datetime.date.today().isoformat(),
            }  # fmt: skip
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            except OSError as error:
                self._fail(error)
                return
            letter = "A" if made.first_is_full else "B"
            self.verdict.value = f"{'Right' if right else 'Wrong'}: {letter} was the full cache's."
            self._next()

    def _next(self) -> None:
        self._number += 1
        self._changed()

    def _read(self) -> tuple[Strategy, int, int, int]:
        return Strategy(keep=self.keep.read(), store=self.store.read()), self.tokens.value, self.new_tokens.value, self._number

    # on the runner's thread

    def _answer(self, ticket: Ticket, lab: Lab, asked: tuple[Strategy, int, int, int], progress: Progress) -> None:
        strategy, tokens, new, number = asked
        ticket.show(self._wait)
        ids = lab.encode_long(self._text[: 8 * tokens * 64])
        if ids.shape[1] < tokens:
            raise ValueError(f"the text has {ids.shape[1]} tokens (allowed: {tokens} or more, as `tokens` says)")
        start = tokens * number % max(1, ids.shape[1] - tokens)
        piece = ids[:, start : start + tokens]
        with lab.replaying():
            full, other = (lab.generate(piece, one, max_new_tokens=new, progress=progress).text for one in (Strategy(), strategy))
        text = lab.tokenizer.decode(piece[0])
        ticket.show(self._show, Round(number, text, full, other, strategy, self._dice.random() < 0.5))

    # always under the runner's lock

    def _wait(self) -> None:
        for button in (self.a, self.b, self.skip):
            button.disabled = True

    def _show(self, made: Round) -> None:
        self.shown["round"] = made
        self._name(self.tokens.value)
        pair = (made.full, made.other) if made.first_is_full else (made.other, made.full)
        tail = html.escape("… " + made.text[-400:], quote=False)
        self.texts.value = f'<div class="kvlab-text">{tail}</div>' + "".join(
            f'<div class="kvlab-text"><b>{letter}</b> {html.escape(said, quote=False)}</div>'
            for letter, said in zip("AB", pair, strict=True)
        )
        self.skip.disabled = False
        for button in (self.a, self.b):
            button.disabled = made.same
        words = (
            "Both go on in the same words: there is nothing to tell apart; take the next text."
            if made.same
            else "One of the two read the text through the full cache."
        )
        self.cards["round"].say(words)
        self.cards["round"].mark("fresh", f"text {made.number + 1}")
        found = self.votes
        right = sum(vote["right"] for vote in found)
        plots.update_votes(self.figures["votes"], right, len(found))
        self._say("votes", plots.votes_summary(right, len(found)), str(made.strategy))

    def __repr__(self) -> str:
        made: Round | None = self.shown.get("round")
        return "BlindTest: nothing shown yet" if made is None else f"BlindTest: {made.strategy.to_code()}\n{self.text}"
