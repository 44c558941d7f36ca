"""lm-evaluation-harness through a strategy: its tasks, scored with the cache in the loop.

    from lm_eval import simple_evaluate
    from kvlab.measure.harness import harness

    simple_evaluate(harness(lab, strategy), tasks=["hellaswag"], limit=100)

The harness (``pip install lm-eval``) brings its data from the hub; nothing here downloads anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvlab.cache import KVCache, forward
from kvlab.lab import Lab
from kvlab.strategy import Strategy

STEP = 16  # tokens of a continuation that are read at once: what comes later is read through the cache


@dataclass(frozen=True)
class Scorer:
    """Log-likelihoods and continuations through one strategy; every request has a cache of its own."""

    lab: Lab
    strategy: Strategy

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """The log-probability (nats) of ``continuation`` after ``context``, and whether greedy decoding would say it.

        Tokens are those of both together, as the harness wants it. An empty context stands for the end-of-text token. Raises ``ValueError`` for an empty
        continuation or more tokens than the model's context.
        """
        if not continuation:
            raise ValueError("continuation='' has nothing to score (allowed: one token or more)")
        before = self._ids(context) if context else self._start()
        whole = self._ids(context + continuation) if context else torch.cat([before, self._ids(continuation)], 1)
        before = before[:, : whole.shape[1] - 1]  # the last token of both may have swallowed the border
        return self._score(before, whole[:, before.shape[1] :])

    def rolling(self, text: str) -> float:
        """The log-probability (nats) of a whole text, its first token after the end-of-text token; longer texts than the context in disjoint windows."""
        start, ids, room = self._start(), self._ids(text), self.lab.context - 1
        windows = [ids[:, i : i + room] for i in range(0, ids.shape[1], room)]
        return sum(self._score(start if i == 0 else windows[i - 1][:, -1:], window)[0] for i, window in enumerate(windows))

    def generate(self, context: str, until: Iterable[str] = (), max_new_tokens: int = 256) -> str:
        """The greedy continuation, cut before the first of ``until``."""
        room = self.lab.context - max_new_tokens
        ids = self._ids(context)[:, -room:]
        text = self.lab.generate(ids, self.strategy, max_new_tokens=max_new_tokens).text
        for end in until:
            if end:
                text = text.split(end)[0]
        return text

    def _ids(self, text: str) -> Tensor:
        return self.lab.encode_long(text)

    def _start(self) -> Tensor:
        token = self.lab.tokenizer.eos_token_id
        return torch.tensor([[token if isinstance(token, int) else 0]], device=self.lab.device)

    def _score(self, before: Tensor, after: Tensor) -> tuple[float, bool]:
        total = before.shape[1] + after.shape[1]
        if total > self.lab.context + 1:
            raise ValueError(f"context and continuation have {total} tokens (allowed: up to {self.lab.context + 1})")
        cache = KVCache(self.lab.model, self.strategy)
        try:
            rows = [self.lab.prefill(before, cache, self.strategy.chunk)[0]]
            rows += [
                forward(self.lab.model, after[:, i : min(i + STEP, after.shape[1] - 1)], cache)[0]
                for i in range(0, after.shape[1] - 1, STEP)
            ]
        finally:
            cache.close()
        logits = torch.cat(rows).float()
        chosen = logits.log_softmax(-1).gather(1, after[0, :, None])
        return float(chosen.double().sum()), bool((logits.argmax(-1) == after[0]).all())


def harness(lab: Lab, strategy: Strategy | None = None) -> Any:
    """An ``lm_eval.api.model.LM`` of this lab and strategy. Raises ``ModuleNotFoundError`` without lm-eval."""
    from lm_eval.api.model import LM

    scorer = Scorer(lab, strategy or Strategy())

    class Model(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return [scorer.loglikelihood(*request.args) for request in requests]

        def loglikelihood_rolling(self, requests: list[Any], **_: Any) -> list[float]:
            return [scorer.rolling(request.args[0]) for request in requests]

        def generate_until(self, requests: list[Any], **_: Any) -> list[str]:
            answers = []
            for request in requests:
                context, how = request.args
                until = how.get("until") or []
                answers.append(
                    scorer.generate(context, [until] if isinstance(until, str) else until, how.get("max_gen_toks", 256))
                )
            return answers

    return Model()
