"""The spectrum: what it shows is what was computed, it follows its controls, says errors and recovers, and can be read as a picture."""

import pytest

pytest.importorskip("ipywidgets")

from kvlab import store
from kvlab.lab import Lab
from kvlab.measure import inspect, spectra
from kvlab.panels.bench import LAYERS
from kvlab.panels.spectrum import DRAWINGS, Spectrum
from kvlab.plots import spectra as plots
from kvlab.plots import style
from tests.conftest import make_llama
from tests.panels.conftest import Characters

TEXT = "The quick brown fox jumps over the lazy dog again and again, all day."[:64]  # 64 tokens: one for each character
HOW = store.LowRank(rank=8, bits=16, first=16, group_size=16, sinks_exact=0)


@pytest.fixture
def panel(tiny_lab):
    made = Spectrum(tiny_lab, TEXT, HOW)
    assert made.wait(60)
    yield made
    made.runner.cancel()
    assert made.wait(60)


def test_it_opens_with_the_ranks_of_this_model(panel):
    assert panel.error.value == ""
    assert panel.stage.value == "done"
    assert (panel.layer.value, panel.layer.max) == (2, 2)
    assert (panel.rank.value, panel.rank.min, panel.rank.max, panel.rank.step) == (8, 8, 16, 8)
    assert panel.model.value == "tiny, 64 tokens"
    assert panel.store == HOW


def test_it_shows_what_was_computed(panel, tiny_lab):
    recorded = inspect.record(tiny_lab, TEXT)
    one, every = spectra.spectra(recorded, 2), spectra.ranks(spectra.every_layer(recorded), 0.95)
    for kind, name in plots.NAMES.items():
        assert list(style.trace(panel.figures["kept"], name).y) == pytest.approx((100 * one.kind(kind)).tolist())
    assert list(style.trace(panel.figures["needed"], "values").y) == every.values.tolist()
    off = inspect.layer_errors(recorded, HOW)
    assert list(style.trace(panel.figures[LAYERS], "keys").y) == pytest.approx((100 * off.keys).tolist())
    # 8 of 16 coefficients of 16 bits; a basis of 16 x 8 and a mean of 16, 32 bits each, for 64 x 16 numbers
    assert "12.50 bits a number at 64 tokens (coefficients 8.00, basis 4.50), 8.02 at 16,384." in panel.text
    assert "In layer 2 the first 8 directions keep" in panel.text
    assert all(card.state == "fresh" and card.text for card in panel.cards.values())


def test_it_follows_its_controls_in_place(panel):
    figures, before = dict(panel.figures), panel.shown["errors"]
    panel.layer.value, panel.rank.value, panel.share.value = 1, 16, 0.8
    assert panel.wait(60)
    assert panel.shown["spectra"].layer == 1
    assert "In layer 1 the first 16 directions keep 100.0% of the variance of keys" in panel.text
    assert "Of 16 directions, 80% of the variance takes" in panel.cards["needed"].text
    assert panel.shown["errors"].mean("keys") < 1e-3 < before.mean("keys")  # all directions
    panel.bits.value = 4
    assert panel.wait(60)
    assert panel.shown["bits"]["codes"] == 4
    panel.pre_rope.value = panel.values.value = False
    assert panel.wait(60)
    assert panel.shown["store"] == store.LowRank(
        rank=16, bits=4, pre_rope=False, values=False, first=16, group_size=16, sinks_exact=0
    )
    assert panel.figures == figures


def test_keys_lose_more_where_the_turn_is_left_in(panel):
    """Random weights have no small subspace, but some directions are larger than others, and the turn mixes them."""
    undone = panel.shown["errors"].keys
    panel.pre_rope.value = False
    assert panel.wait(60)
    assert (panel.shown["errors"].keys != undone).all()
    assert panel.shown["spectra"].before is not panel.shown["spectra"].after


def test_the_newest_of_many_moves_wins_and_the_text_is_read_once(panel, monkeypatch):
    monkeypatch.setattr(inspect, "record", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr(spectra, "every_layer", lambda *_: pytest.fail("worked out again"))
    for number in range(40):
        panel.layer.value = number % 3
    assert panel.wait(60)
    assert panel.error.value == ""
    assert panel.shown["spectra"].layer == 0
    assert panel.runner.started < 40


def test_a_store_sets_the_controls(panel):
    before = panel.shown["spectra"].values
    panel.store = store.LowRank(rank=16, bits=8, first=32, group_size=16, values=False, sinks_exact=4)
    assert panel.wait(60)
    assert (panel.shown["spectra"].values != before).any()  # four tokens fewer
    assert (panel.rank.value, panel.bits.value, panel.values.value, panel.pre_rope.value) == (16, 8, False, True)
    assert panel.shown["store"].first == 32


def test_too_few_tokens_for_a_basis_are_said(panel):
    panel.store = store.LowRank(rank=8)
    assert panel.wait(60)
    assert panel.error.value == ""
    assert "Nothing is written yet: too few tokens for a basis." in panel.cards[LAYERS].text


def test_a_rank_above_the_head_dim_becomes_the_head_dim(tiny_lab):
    panel = Spectrum(tiny_lab, TEXT)
    assert panel.wait(60)
    assert panel.error.value == ""
    assert (panel.rank.value, panel.shown["store"].rank) == (16, 16)


def test_an_error_is_one_red_line_and_the_next_run_recovers(panel, monkeypatch):
    before = panel.text
    with monkeypatch.context() as broken:
        broken.setattr(inspect, "layer_errors", lambda *_: (_ for _ in ()).throw(ValueError("no such <thing>")))
        panel.rank.value = 16
        assert panel.wait(60)
    assert "<b>no such &lt;thing&gt;</b>" in panel.error.value
    assert "<details>" in panel.error.value
    assert {card.state for card in panel.cards.values()} == {"stale"}
    panel.rank.value = 8
    assert panel.wait(60)
    assert panel.error.value == ""
    assert panel.text == before


def test_a_head_dim_that_cannot_be_written_is_said():
    panel = Spectrum(Lab("odd", make_llama(head_dim=12), Characters()), TEXT, HOW)
    assert panel.wait(60)
    assert "a head dim of 12 is no multiple of 8" in panel.error.value


def test_an_empty_text_is_said(tiny_lab):
    panel = Spectrum(tiny_lab, "")
    assert panel.wait(60)
    assert "prompt='' is empty" in panel.error.value
    assert panel.text == ""
    assert repr(panel) == "Spectrum: nothing looked at yet"


def test_saved_for_readers_it_is_a_picture_with_its_text(panel, monkeypatch):
    drawn = []
    monkeypatch.setattr("kvlab.panels.bench.sheet", lambda columns: drawn.extend(columns) or b"png")
    assert "image/png" not in panel._repr_mimebundle_()
    monkeypatch.setenv("KVLAB_PICTURES", "1")
    bundle = panel._repr_mimebundle_()
    assert bundle["image/png"] == "cG5n"
    assert bundle["text/plain"] == f"Spectrum: {HOW.to_code()}\n{panel.text}"
    assert sorted(title for column in drawn for title, _ in column) == sorted(drawing.title for drawing in DRAWINGS.values())
