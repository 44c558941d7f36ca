"""A run stage by stage, without a panel; the pictures of attention and error; a strategy on a big model."""

from typing import Any

import numpy as np
import pytest
import torch

from kvlab import geometry, keep, place, store
from kvlab.cache import KVCache
from kvlab.errors import Cancelled
from kvlab.lab import Lab
from kvlab.measure import control, look, quality, scale
from kvlab.measure.scale import Prediction
from kvlab.measure.session import Ran, Request, Row, Scores, Session
from kvlab.measure.tasks import Needle
from kvlab.strategy import Strategy
from tests.panels.conftest import Characters

PROMPT = "it was the best of times, it was the worst of times, " * 4  # 212 tokens
SMALL = Strategy(keep=keep.HeavyHitter(budget=64, recent=16, sinks=4), store=store.Int(bits=8, group_size=16))


@pytest.fixture
def session(llama: Any) -> Session:
    return Session(Lab("tiny", llama, Characters()))


def run(session: Session, strategy: Strategy = SMALL, prompt: str = PROMPT, **how: Any) -> dict[type, Any]:
    return {type(stage): stage for stage in session.run(Request(strategy, prompt, **how))}


# the stages


def test_the_stages_in_their_order_and_that_they_agree(session: Session) -> None:
    stages = list(session.run(Request(SMALL, PROMPT, layer=1)))
    assert [type(stage) for stage in stages] == [Prediction, Ran, Scores, Needle, Row]
    made, ran, scores, hidden, row = stages
    n = len(PROMPT)
    assert made.tokens[-1] == ran.generation.memory.seen == n + 23
    assert row.memory == ran.generation.memory
    assert row.kl == scores.quality.mean_kl
    assert row.found == hidden.found
    assert ran.words == tuple(session.lab.tokenizer.decode([t]) for t in ran.generation.tokens)
    assert ran.attention.layer == ran.error.layer == 1
    assert (scores.prefill, len(scores.words)) == (n // 2, n - n // 2)
    assert "".join(scores.words) == PROMPT[n // 2 :]


def test_it_is_what_the_measures_give_by_themselves(session: Session) -> None:
    stages = run(session)
    lab, ids = session.lab, session.lab.encode(PROMPT)
    assert stages[Ran].generation.text == lab.generate(PROMPT, SMALL, max_new_tokens=24).text
    assert stages[Ran].full.text == lab.generate(PROMPT, max_new_tokens=24).text
    own = quality(lab, SMALL, control(lab, ids, prefill=ids.shape[1] // 2, step=16))
    assert torch.allclose(own.kl, stages[Scores].quality.kl)


def test_the_full_cache_is_its_own_control(session: Session) -> None:
    stages = run(session, Strategy())
    assert stages[Row].kl == pytest.approx(0, abs=1e-9)
    assert stages[Row].agreement == 1.0
    assert not stages[Scores].evicted.any()
    assert float(np.nanmax(stages[Ran].error.keys)) == 0.0
    full = session.full_row(Request(Strategy(), PROMPT))
    assert (full.perplexity, full.kl, full.found) == (pytest.approx(stages[Row].perplexity), 0.0, stages[Row].found)


def test_evictions_are_those_that_the_scored_token_felt(session: Session) -> None:
    evicted = run(session)[Scores].evicted
    # 106 tokens at once, seen whole; then 64 stay: the second token is predicted from a cache that has let go of 106 - 64
    assert evicted[:2].tolist() == [0, 42]
    assert evicted[16:18].tolist() == [42, 58]
    chunked = run(session, Strategy(keep=SMALL.keep, chunk=50))[Scores].evicted
    assert chunked[:2].tolist() == [100 - 64, 42]


def test_what_is_known_is_not_run_again(session: Session) -> None:
    first, second = run(session), run(session)
    assert second[Ran] is first[Ran]
    assert second[Scores] is first[Scores]
    other = run(session, layer=2)
    assert other[Ran] is not first[Ran]
    assert other[Scores] is first[Scores]
    again = {type(s): s for s in session.run(Request(SMALL, PROMPT), fresh=True)}
    assert again[Ran] is not first[Ran]
    assert again[Ran].full is first[Ran].full  # the control stays


def test_two_prompts_are_remembered(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    fulls = [run(session, prompt=PROMPT[start:])[Ran].full for start in (0, 9)]
    assert run(session, prompt=PROMPT, layer=2)[Ran].full is fulls[0]
    run(session, prompt=PROMPT[18:])
    assert run(session, prompt=PROMPT, layer=1)[Ran].full is fulls[0]
    assert run(session, prompt=PROMPT[9:], layer=1)[Ran].full is not fulls[1]


def test_a_cancelled_run_leaves_nothing_half_done(session: Session) -> None:
    seen: list[str] = []

    def cancel(stage: str, done: int, total: int) -> None:
        seen.append(stage)
        if stage == "scoring":
            raise Cancelled

    with pytest.raises(Cancelled):
        list(session.run(Request(SMALL, PROMPT), cancel))
    assert "full cache: continuing" in seen
    assert run(session)[Row].kl == run(Session(session.lab))[Row].kl


def test_short_prompts(session: Session) -> None:
    one = run(session, prompt="x")
    assert Scores not in one
    assert one[Row].perplexity is None
    two = run(session, prompt="xy")
    assert len(two[Scores].words) == 1
    assert session.full_row(Request(SMALL, "x")).kl is None


@pytest.mark.parametrize(("how", "said"), [({"prompt": ""}, "empty"), ({"layer": 3}, "layer=3"), ({"layer": -1}, "0 to 2")])
def test_requests_that_cannot_be(session: Session, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(session, **how)


def test_files_of_an_offload_go_with_the_run(session: Session, tmp_path: Any) -> None:
    strategy = Strategy(place=place.Offload(to="disk", folder=str(tmp_path)))
    assert run(session, strategy)[Row].memory.by_device()["disk"] > 0
    assert list(tmp_path.iterdir()) == []


# looking inside


def watched(lab: Lab, strategy: Strategy, prompt: str, new: int, bins: int = 256) -> tuple[look.Attention, KVCache]:
    cache = KVCache(lab.model, strategy)
    watch = look.Heads(1, len(prompt) + new - 1, bins)
    cache.watch(watch)
    lab.generate(prompt, cache=cache, max_new_tokens=new)
    return watch.attention(), cache


def test_every_row_of_a_picture_sums_to_one(session: Session) -> None:
    for strategy in (Strategy(), SMALL, Strategy(keep=SMALL.keep, chunk=50)):
        made, _ = watched(session.lab, strategy, PROMPT, 24)
        assert made.whole.shape == (4, 235, 235)
        assert made.steps.shape == (4, 23, 235)
        assert np.nansum(made.steps, -1) == pytest.approx(1, abs=1e-5)
        assert np.nansum(made.whole, -1) == pytest.approx(1, abs=1e-5)


def test_the_picture_of_one_head_is_that_of_the_watch_in_core(session: Session) -> None:
    from kvlab.attention import Watch

    for head in (0, 3):
        cache = KVCache(session.lab.model, SMALL)
        watch = Watch(1, head, 235, bins=50)
        cache.watch(watch)
        session.lab.generate(PROMPT, cache=cache, max_new_tokens=24)
        picture, _ = watch.picture()
        made, _ = watched(session.lab, SMALL, PROMPT, 24, bins=50)
        lower = np.tril(np.ones((50, 50), bool))
        assert made.whole[head][lower] == pytest.approx(picture.numpy()[lower], abs=1e-6)
        assert made.sink_share[head] == pytest.approx(watch.sink_share, abs=1e-5)


def test_what_was_evicted_is_marked_and_gets_nothing(session: Session) -> None:
    made, _ = watched(session.lab, Strategy(keep=keep.Window(size=30, sinks=2)), PROMPT, 24)
    last = made.steps_evicted[0, -1]
    assert last[:2].tolist() == [False, False]
    assert last[2 : 235 - 31].all()
    assert not last[235 - 30 :].any()
    assert made.first_step == 212
    assert np.nansum(made.steps[made.steps_evicted]) == 0
    assert not made.whole_evicted[:, :212].any()  # the prompt attends to all of itself


def test_error_against_the_exact_keys(session: Session) -> None:
    lab, shares = session.lab, []
    exact = watched(lab, Strategy(), PROMPT, 1)[1]
    for bits in (8, 4, 2):
        _, cache = watched(lab, Strategy(store=store.Int(bits=bits, group_size=16)), PROMPT, 1)
        off = look.error(cache, exact, 1, len(PROMPT))
        assert off.keys.shape == (2, 16, 212)
        shares.append(off.key_share.mean())
    assert shares[0] < 0.01 < shares[1] < shares[2]
    _, cache = watched(lab, SMALL, PROMPT, 1)
    gone = np.isnan(look.error(cache, exact, 1, len(PROMPT)).keys[:, 0])
    assert gone.sum(1).tolist() == [212 - 64] * 2


def test_a_watch_that_saw_nothing() -> None:
    with pytest.raises(ValueError, match="recorded nothing"):
        look.Heads(0, 8).attention()


# scaled up


def test_the_prediction_is_that_of_predict(session: Session) -> None:
    from kvlab.measure import predict

    made = session.predict(SMALL, PROMPT)
    assert made.total == pytest.approx(sum(predict(session.lab.geometry, SMALL, 235, bits=32).values()))
    assert made.full16[-1] == 235 * 3 * 2 * 2 * 16 * 2
    assert made.full[-1] == 2 * made.full16[-1]


def test_the_full_cache_on_a_big_model_is_geometrys() -> None:
    made = scale.scaled(Strategy(), "Llama-3.1-8B", "H100 SXM 80GB", requests=16)
    assert made.predicted == made.full
    assert made.fits == pytest.approx(made.fits_full, rel=1e-3)
    assert made.moved is None


def test_sliding_layers_stay_short_on_a_big_model() -> None:
    made = scale.scaled(Strategy(), "Gemma-2-9B", "H100 SXM 80GB")
    # kvlab holds what attention can still see, one token less than the window, and the tokens' columns
    assert [point.kv for point in made.predicted] == pytest.approx([point.kv for point in made.full], rel=1e-3)


def test_four_bits_go_further_and_a_budget_has_no_end() -> None:
    four = scale.scaled(Strategy(store=store.Int(bits=4)), "Llama-3.1-70B", "H100 SXM 80GB", devices=4, requests=16)
    assert four.fits_full is not None
    assert four.fits is not None
    assert 3 < four.fits / four.fits_full < 4
    assert scale.scaled(SMALL, "Llama-3.1-8B", "H100 SXM 80GB").fits is None
    assert scale.scaled(Strategy(), "Llama-3.1-70B", "H100 SXM 80GB").fits == 0


def test_offloading_leaves_two_layers_on_the_device() -> None:
    made = scale.scaled(Strategy(place=place.Offload()), "Llama-3.1-8B", "H100 SXM 80GB", requests=16)
    full = geometry.kv_bytes(geometry.find("Llama-3.1-8B"), made.here, requests=16)
    assert made.elsewhere == full
    assert made.at(made.here).kv == full * 2 // 32
    assert made.moved == pytest.approx(full / 63e9, rel=0.01)  # PCIe 5.0 x16


def test_devices_for_a_model() -> None:
    names = ("Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B")
    assert [scale.devices_for(name, "H100 SXM 80GB") for name in names] == [1, 4, 16]
