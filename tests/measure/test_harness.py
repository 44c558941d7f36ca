"""The adapter for lm-evaluation-harness: sums of log-probabilities against one forward pass without any cache."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch

from kvlab import Strategy, keep
from kvlab.attention import detach
from kvlab.lab import Lab
from kvlab.measure.harness import Scorer, harness
from tests.panels.conftest import Characters


@pytest.fixture(scope="module")
def lab(llama) -> Lab:
    return Lab("tiny", llama, Characters())


def direct(lab: Lab, ids: torch.Tensor, first: int) -> tuple[float, bool]:
    """Of the tokens from ``first`` on, by one pass over all."""
    detach(lab.model)
    with torch.no_grad():
        logits = lab.model(ids, use_cache=False).logits[0, first - 1 : -1].double()
    want = ids[0, first:]
    return float(logits.log_softmax(-1).gather(1, want[:, None]).sum()), bool((logits.argmax(-1) == want).all())


def test_it_is_the_whole_text_at_once(lab):
    scorer = Scorer(lab, Strategy())
    context, continuation = "a context of some length, ", "and what comes after it, longer than one piece"
    made = scorer.loglikelihood(context, continuation)
    want = direct(lab, lab.encode(context + continuation), len(context))
    assert made[0] == pytest.approx(want[0], abs=1e-3) and made[1] == want[1]
    said = lab.generate(context, max_new_tokens=5)
    greedy = "".join(lab.tokenizer.decode([token]) for token in said.tokens)
    assert scorer.loglikelihood(context, greedy)[1] is True


def test_a_whole_text_in_windows(lab):
    scorer = Scorer(lab, Strategy())
    end = torch.tensor([[lab.tokenizer.eos_token_id]])
    text = "some text to be scored as a whole"
    ids = torch.cat([end, lab.encode(text)], 1)
    assert scorer.rolling(text) == pytest.approx(direct(lab, ids, 1)[0], abs=1e-3)
    long = "words that go on and on " * 30  # 720 tokens: two windows, the context being 512
    ids = lab.encode_long(long)
    first = direct(lab, torch.cat([end, ids[:, :511]], 1), 1)[0]
    rest = direct(lab, ids[:, 510:], 1)[0]
    assert scorer.rolling(long) == pytest.approx(first + rest, abs=1e-2)


def test_a_strategy_makes_a_difference(lab):
    text = "a context that is longer than the window of the strategy, by far " * 2
    full, window = (
        Scorer(lab, how).loglikelihood(text, "and on it goes")[0] for how in (Strategy(), Strategy(keep.Window(size=16, sinks=2)))
    )
    assert full != pytest.approx(window, abs=1e-3)


def test_what_the_harness_asks(lab, monkeypatch):
    api = types.ModuleType("lm_eval.api.model")
    api.LM = type("LM", (), {"__init__": lambda self: None})
    for name, module in (
        ("lm_eval", types.ModuleType("lm_eval")),
        ("lm_eval.api", types.ModuleType("lm_eval.api")),
        ("lm_eval.api.model", api),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    model = harness(lab)
    assert isinstance(model, api.LM)
    ask = lambda *args: SimpleNamespace(args=args)  # noqa: E731
    scorer = Scorer(lab, Strategy())
    assert model.loglikelihood([ask("one ", "two"), ask("", "three")]) == [
        scorer.loglikelihood("one ", "two"),
        scorer.loglikelihood("", "three"),
    ]
    assert model.loglikelihood_rolling([ask("a text")]) == [scorer.rolling("a text")]
    plain = lab.generate("go on", max_new_tokens=6).text
    stop = plain[3]
    assert model.generate_until([ask("go on", {"until": [stop], "max_gen_toks": 6})]) == [plain.split(stop)[0]]


def test_what_cannot_be_scored(lab):
    with pytest.raises(ValueError, match="has nothing to score"):
        Scorer(lab, Strategy()).loglikelihood("a", "")
    with pytest.raises(ValueError, match="tokens \\(allowed: up to 513\\)"):
        Scorer(lab, Strategy()).loglikelihood("a" * 500, "b" * 20)
