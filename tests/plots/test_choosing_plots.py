"""Figures for choosing: their numbers, where they change, and what they say in words."""

from math import comb

import pytest

from kvlab import Strategy, geometry, hardware, store
from kvlab.advise import Limits, advise
from kvlab.measure.experiment import Evidence
from kvlab.measure.recipe import Step
from kvlab.measure.roofline import decode, prefill
from kvlab.plots import choosing as plots
from kvlab.plots import style

MODEL, CARD = geometry.find("Llama-3.1-8B"), hardware.find("A10 24GB")


def test_constraints_and_options() -> None:
    made = advise("Llama-3.1-8B", "A10 24GB", 32768, 4, limits=Limits(per_token=0.04))
    fig = plots.constraints(made.constraints)
    bars = style.trace(fig, "need")
    assert list(bars.x) == [100 * one.ratio for one in made.constraints] and list(bars.marker.color) == [style.DANGER] * 2
    fig = plots.options(made)
    bars = style.trace(fig, "bytes")
    assert [value * 1e9 for value in bars.x] == pytest.approx([option.bytes for option in made.options])
    assert list(bars.marker.opacity) == [1.0 if option.meets else 0.35 for option in made.options]
    assert plots.options_summary(made).startswith(
        f"{sum(o.meets for o in made.options)} of {len(made.options)} meet the limits. First: {made.best.strategy}"
    )
    nothing = advise("Llama-3.1-8B", "A10 24GB", 32768, 4, limits=Limits(per_token=1e-4))
    assert plots.options_summary(plots.update_options(fig, nothing) and nothing).startswith(
        "Nothing meets the limits; nearest is"
    )
    assert set(bars.marker.opacity) == {0.35}


def test_the_roof_is_flat_beyond_the_ridge() -> None:
    points = [decode(MODEL, CARD, one, 8192) for one in (Strategy(), Strategy(store=store.Int(bits=4)))] + [
        prefill(MODEL, CARD, 8192)
    ]
    fig = plots.roofline(points, CARD.bandwidth, CARD.flops)
    roof = style.trace(fig, "roof")
    assert roof.y[1] == roof.y[2] == CARD.flops and roof.x[1] == CARD.flops / CARD.bandwidth and roof.y[0] < roof.y[1]
    assert list(style.trace(fig, "decode").x) == [point.intensity for point in points[:2]]
    for point in points:  # nothing stands above its roof
        assert point.rate <= min(CARD.flops, CARD.bandwidth * point.intensity) * 1.000001
    said = plots.roofline_summary(points, CARD.bandwidth, CARD.flops)
    assert "The ridge is at 208 FLOP a byte" in said and "bound by compute" in said and said.endswith("Predicted.")
    assert plots.roofline_summary(points[2:], 1.0, 1.0) == "No step is shown."


def test_a_waterfall_ends_where_its_last_layer_does() -> None:
    steps = [
        Step(name, Strategy(), device, device, device, 1000, kl, 1 - kl, 0.0, 0.1)
        for name, device, kl in (("full cache", 2000, 0.0), ("int4", 300, 0.01), ("disk", 20, 0.01))
    ]
    bars = style.trace(plots.waterfall(steps), "bytes")
    assert list(bars.y) == [200.0, -170.0, -28.0, 2.0] and list(bars.measure) == ["absolute", "relative", "relative", "total"]
    said = plots.waterfall_summary(steps)
    assert "int4: 200% to 30% on the device, KL 0.000 to 0.010 nats, 99% same next token" in said


def test_bytes_by_context() -> None:
    fig = plots.bytes_by_context([0, 1024], {"full cache": [0.0, 2e9], "int4": [0.0, 5e8]})
    assert list(style.trace(fig, "int4").y) == [0.0, 0.5] and "(GB)" in fig.layout.yaxis.title.text
    assert plots.bytes_by_context_summary([0, 1024], {"int4": [0.0, 5e8]}) == "At 1,024 tokens, predicted: int4 500 MB."


def test_waits() -> None:
    more = {"first_token": 1.0, "first_token_most": 1.5, "per_token": 0.1, "per_token_p95": 0.12}
    rows = [Evidence("full cache", Strategy().to_dict(), {"task": "Speed"}, "tiny", more=more)]
    fig = plots.waits(rows, ["full cache"])
    assert list(style.trace(fig, "first token").x) == [1000.0] and list(
        style.trace(fig, "one more token").error_x.array
    ) == pytest.approx([20.0])
    assert (
        plots.waits_summary(rows, ["full cache"])
        == "full cache: first token 1,000 ms (slowest 1,500), then 100 ms (95% within 120)."
    )


@pytest.mark.parametrize("count", [1, 5, 10, 40])
def test_guessing_stays_between_its_quantiles(count: int) -> None:
    low, high = (round(share * count / 100) for share in plots.guessing(count))
    chance = [comb(count, right) / 2**count for right in range(count + 1)]
    assert sum(chance[low : high + 1]) >= 0.95
    assert sum(chance[:low]) <= 0.025 and sum(chance[high + 1 :]) <= 0.025
    assert low + high == count


def test_votes() -> None:
    fig = plots.votes(9, 10)
    assert list(style.trace(fig, "votes").y) == [90.0]
    assert plots.votes_summary(9, 10).endswith("more often than guessing: the two can be told apart.")
    assert (
        plots.votes_summary(6, 10)
        == "6 of 10 votes were right (60%; a guesser stays between 20% and 80%), as guessing would be: they were not told apart."
    )
    assert plots.votes_summary(0, 0) == "No votes yet. Guessing is right half of the time."
    assert list(style.trace(plots.update_votes(fig, 0, 0), "votes").y) == []
