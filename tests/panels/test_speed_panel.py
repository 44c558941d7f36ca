"""The panel of notebook 01: recorded rows first, then what was measured here, and it survives errors and cancelling."""

import pytest

pytest.importorskip("ipywidgets")

from kvlab.measure import speed
from kvlab.panels.speed import MEASURED, CacheOrNot
from kvlab.plots import speed as plots
from kvlab.plots import style


@pytest.fixture
def panel(tiny_lab):
    made = CacheOrNot(tiny_lab)
    yield made
    made.runner.cancel()
    assert made.wait(60)


def shown(panel: CacheOrNot) -> set[str]:
    return {trace.name.partition(", ")[2] for trace in panel.figure.data if trace.visible is not False}


def test_it_opens_with_recorded_rows_and_a_small_run_of_its_own(panel):
    assert f"Recorded: {speed.read().where}." in panel.summary.value
    assert panel.wait(60)
    assert panel.error.value == ""
    assert [row.context for row in panel.measured.rows] == [16, 64, 256]
    assert shown(panel) == {plots.RECORDED, MEASURED}
    assert "Recorded: " in panel.summary.value
    assert panel.stage.value == "done"


def test_after_run_only_what_was_measured_here_is_shown(panel):
    figure = panel.figure
    panel.context.value, panel.new_tokens.value = 128, 2
    panel.run.click()
    assert panel.wait(60)
    assert [row.context for row in panel.measured.rows] == [32, 128]
    assert [row.new_tokens for row in panel.measured.rows] == [2, 2]
    assert shown(panel) == {MEASURED}
    for box in (panel, panel.speedup, panel.phases):
        assert "Measured here: tiny in float32" in box.summary.value
    assert list(style.trace(panel.phases.figure, plots.WRITE).x) == ["32", "128"]
    assert panel.figure is figure


def test_a_value_that_arrives_after_the_press_counts(panel):
    panel.run.click()
    panel.context.value = 64
    assert panel.wait(60)
    assert [row.context for row in panel.measured.rows] == [16, 64]
    panel.context.value = 128
    assert not panel.runner.busy  # a slider alone measures nothing


def test_cancel_keeps_what_is_there(panel):
    panel.run.click()
    panel.cancel.click()
    assert panel.wait(60)
    assert panel.stage.value == "cancelled"
    assert panel.cancel.disabled
    assert panel.error.value == ""


def test_an_error_is_said_and_the_next_run_recovers(panel, monkeypatch):
    assert panel.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(speed, "_without", lambda *_: 1 / 0)
        panel.run.click()
        assert panel.wait(60)
        assert "division by zero" in panel.error.value
        assert "<details>" in panel.error.value
    panel.context.value = 64
    panel.run.click()
    assert panel.wait(60)
    assert panel.error.value == ""
    assert [row.context for row in panel.measured.rows] == [16, 64]


def test_without_a_recording_it_shows_its_own_rows(tiny_lab, monkeypatch):
    monkeypatch.setattr(speed, "RECORDED", "results/none.jsonl")
    panel = CacheOrNot(tiny_lab)
    assert panel.wait(60)
    assert shown(panel) == {MEASURED}
    assert "Measured here: " in panel.speedup.summary.value


def test_for_pictures_nothing_runs_by_itself(tiny_lab, monkeypatch):
    monkeypatch.setenv("KVLAB_PICTURES", "1")
    panel = CacheOrNot(tiny_lab)
    assert not panel.runner.busy
    assert shown(panel) == {plots.RECORDED}
