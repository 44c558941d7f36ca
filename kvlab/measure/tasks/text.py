"""Text: the reference protocol, quality with the cache in the loop."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.lab import Lab, Progress
from kvlab.measure.phases import phases
from kvlab.measure.quality import REFERENCE, Control, control, quality
from kvlab.measure.tasks.base import Case, Score, Task
from kvlab.strategy import Strategy
from kvlab.texts import reference_text

_controls: weakref.WeakKeyDictionary[Any, dict[Text, Control]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Text(Task):
    """``prefill`` tokens of the reference text (or ``file``) at once, then ``scored`` more through the cache, ``step`` at a time. The score is how often both
    caches would say the same next token; ``more`` has perplexity, its change and the KL divergence (nats). The full cache scores 1 by definition.
    """

    title = "text"

    prefill: int = REFERENCE[0]
    scored: int = REFERENCE[1]
    step: int = REFERENCE[2]
    file: str = ""

    def check(self) -> None:
        self.within(prefill=(1, 1 << 20), scored=(1, 1 << 20), step=(1, 1 << 20))

    def cases(self, lab: Lab) -> Iterator[Case]:
        return iter(())

    def run(self, lab: Lab, strategy: Strategy | None = None, *, progress: Progress | None = None) -> Score:
        against = self._control(lab, progress)
        with phases() as spent:
            made = quality(lab, strategy or Strategy(), against, progress=progress)
        more = {"perplexity": made.perplexity, "perplexity_change": made.perplexity_change, "kl": made.mean_kl}
        return Score(made.agreement, made.memory, more=more, spent=spent)

    def _control(self, lab: Lab, progress: Progress | None) -> Control:
        """The full cache's run: once a model and setting."""
        known = _controls.setdefault(lab.model, {})
        if self not in known:
            known.clear()  # its logits are large
            if self.file and not Path(self.file).is_file():
                raise ValueError(
                    f"Text: file={self.file!r} is not there (allowed: a text file in UTF-8, or '' for the Python reference)"
                )
            text = Path(self.file).read_text(encoding="utf-8") if self.file else reference_text()
            need = self.prefill + self.scored
            ids = lab.encode_long(text[: 8 * need])[:, :need]
            if ids.shape[1] < need:
                raise ValueError(
                    f"Text: the text has {ids.shape[1]} tokens (allowed: {need} or more for prefill and scored together)"
                )
            known[self] = control(lab, ids, prefill=self.prefill, step=self.step, progress=progress)
        return known[self]
