"""Quality along the text and the two continuations: what is drawn, what is marked, what is said. And growth beside a pinned run."""

import numpy as np
import pytest

pytest.importorskip("plotly")
import plotly.graph_objects as go

from kvlab.plots import compare, memory, quality, style

LOSS, KL, EVICTED = [0.5, -0.25, 0.0, 2.0], [1e-2, 0.0, 1e-3, 1.0], [0, 0, 8, 8]


def y(fig: go.Figure, name: str) -> list[float]:
    return list(style.trace(fig, name).y)


def test_three_strips_over_the_tokens() -> None:
    fig = quality.along(256, LOSS, KL, EVICTED)
    assert y(fig, "worse") == [0.5, 0, 0, 2]
    assert y(fig, "better") == [0, -0.25, 0, 0]
    assert y(fig, "KL") == [1e-2, 1e-6, 1e-3, 1.0]  # zero is drawn at the floor, and the axis says so
    assert y(fig, "KL, mean of 16")[:2] == pytest.approx([1e-2, 5e-3])
    assert y(fig, "evicted") == EVICTED
    assert list(style.trace(fig, "worse").x) == [256, 257, 258, 259]
    assert style.trace(fig, "A: KL, mean of 16").visible is False
    titles = [axis.title.text for axis in (fig.layout.yaxis, fig.layout.yaxis2, fig.layout.yaxis3)]
    assert all("(nats)" in title or "(tokens)" in title for title in titles)
    assert fig.layout.yaxis2.ticktext[0].startswith("≤")


def test_hues_mean_what_they_mean_everywhere() -> None:
    fig = quality.along(0, LOSS, KL, EVICTED)
    assert style.trace(fig, "worse").fillcolor == style.DANGER
    assert style.trace(fig, "evicted").fillcolor == style.KEEP


def test_it_is_updated_in_place_with_a_pinned_run() -> None:
    fig = go.FigureWidget(quality.along(256, LOSS, KL, EVICTED))
    traces = list(fig.data)
    quality.update_along(fig, 100, [0.0, 0.0], [0.0, 0.0], [0, 0], other_kl=[0.5, 0.25], title="full cache")
    assert y(fig, "A: KL, mean of 16") == [0.5, 0.375]
    assert style.trace(fig, "evicted").visible == "legendonly"
    assert list(fig.layout.xaxis3.range) == [99, 102]
    assert fig.layout.title.text == "full cache"
    quality.update_along(fig, 0, [], [], [])
    assert list(fig.data) == traces


def test_columns_that_differ() -> None:
    with pytest.raises(ValueError, match="loss 4, KL 3, evicted 4"):
        quality.along(0, LOSS, KL[:3], EVICTED)


def test_running_mean() -> None:
    assert quality.running_mean(np.arange(5.0), 2).tolist() == [0, 0.5, 1.5, 2.5, 3.5]
    assert quality.running_mean(np.array([])).tolist() == []


def test_the_summary_names_the_token_that_was_hit_hardest() -> None:
    line = quality.along_summary(14.05, 13.61, 0.0266, 0.92, ["a", "b", " c", " Paris"], LOSS, 256)
    assert (
        line
        == "KL 0.027 nats, 92% agree; perplexity 14.1, +3.2% on the full cache's; hardest hit: “Paris”, token 259, +2.0 nats."
    )
    assert quality.along_summary(13.61, 13.61, 0, 1, [" \n"], [0.0], 0).endswith("+0% on the full cache's.")


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [
        ("it is Paris.", "it is Paris.", None),
        ("it is Paris.", "it is Porto.", 6),
        ("it is", "it is Paris", 5),
        ("", "x", 0),
        ("abc", "abd", 0),
        ("one two ", "one two three", 8),
    ],
)
def test_texts_part_at_the_start_of_a_word(one: str, other: str, at: int | None) -> None:
    assert quality.first_difference(one, other) == at


def test_the_first_difference_is_marked_and_text_is_text() -> None:
    page = quality.continuations(
        "The <b>capital</b> " * 20, " is Paris, and", [("A", "red", " is Paris, and"), ("B", "blue", " is <i>Rome</i>, and")]
    )
    assert page.count("<mark") == 1
    assert "▸&lt;i&gt;Rome&lt;/i&gt;,</mark>" in page
    assert "<b>capital" not in page
    assert "… " in page
    ended = quality.continuations("x", "one two", [("B", "blue", "one")])
    assert "(ends here)" in ended


def test_the_continuations_in_words() -> None:
    assert quality.continuations_summary("a b c", "a b c") == "It says the same as the full cache."
    assert quality.continuations_summary("it is a dog", "it is a cat") == (
        "It parts from the full cache after 3 words: “cat” instead of “dog”."
    )
    assert "“the end” instead of “three”" in quality.continuations_summary("one two three", "one two")


def test_growth_beside_16_bits_and_a_pinned_run() -> None:
    tokens, full = [0, 1000], [0.0, 40e6]
    fig = go.FigureWidget(memory.growth(tokens, full, {"codes": [0, 5e6]}))
    compare.update_growth(fig, tokens, full, {"codes": [0, 5e6]}, full16=[0, 20e6], pinned=([0, 1000], [0, 60e6]), high_water=9e6)
    assert y(fig, "full cache at 16 bits") == [0, 20]
    assert y(fig, "A, pinned") == [0, 60]
    assert fig.layout.yaxis.range[1] == pytest.approx(63)
    compare.update_growth(fig, tokens, full, {"codes": [0, 5e6]}, full16=full)
    assert style.trace(fig, "full cache at 16 bits").visible is False
    assert style.trace(fig, "A, pinned").visible is False
    assert y(fig, "codes") == [0, 5]
