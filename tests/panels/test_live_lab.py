"""The live lab, driven by its widgets' values on a tiny model: every control, every card, errors, cancelling, pinning."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("anywidget")
import ipywidgets as widgets

import kvlab
from kvlab import geometry, keep, place, store
from kvlab.lab import Lab
from kvlab.panels.live_lab import LiveLab
from kvlab.panels.runner import WORK
from kvlab.panels.widgets import MethodControls, StrategyControls, control
from kvlab.plots import style
from kvlab.strategy import AXES, Setting, Strategy, methods

PROMPT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 2
SMALL = Strategy(keep=keep.HeavyHitter(budget=96, recent=32, sinks=4), store=store.Int(bits=4, group_size=16))
LONG = 120.0


@pytest.fixture
def panel(tiny_lab: Lab) -> Iterator[LiveLab]:
    made = LiveLab(tiny_lab, prompt=PROMPT, strategy=SMALL)
    assert made.wait(LONG)
    yield made
    made.runner.cancel()
    assert made.wait(LONG)


def states(panel: LiveLab) -> set[str]:
    return {card.state for card in panel.cards}


# a run


def test_it_opens_with_a_whole_run(panel: LiveLab) -> None:
    assert panel.error.value == ""
    assert states(panel) == {"fresh"}
    row = panel.row
    assert row.strategy == SMALL
    assert row.memory.stored == 96
    assert row.tokens == len(PROMPT) + 23
    assert f"{100 * row.memory.ratio:.1f}% of 16-bit at {row.tokens} tokens" in panel.memory.text
    assert f"{100 * row.agreement:.0f}% agree" in panel.quality.text
    assert "evicted" in panel.attention.text
    assert list(panel.table.rows) == ["full", "this"]
    assert panel.table.rows["full"].kl == 0.0
    assert panel.says.found is panel.row.found
    assert "Llama-3.1-8B on 1 × H100 SXM 80GB" in panel.memory.scale_summary.value


def test_the_figures_carry_the_numbers(panel: LiveLab) -> None:
    ran, scores = panel.shown["ran"], panel.shown["scores"]
    measured = style.trace(panel.memory.figure, "measured")
    assert list(measured.x) == [seen for seen, _ in ran.generation.growth]
    assert measured.y[-1] == pytest.approx(panel.row.memory.allocated / 1e3)  # kB: the unit of the high-water mark
    kl = style.trace(panel.quality.figure, "KL")
    assert np.allclose(kl.y, scores.quality.kl.numpy().clip(1e-6))
    assert kl.x[0] == len(PROMPT) // 2
    assert style.trace(panel.quality.figure, "evicted").y[-1] == scores.evicted[-1] > 0
    assert style.trace(panel.attention.figure, "value").z.shape == ran.attention.steps.shape[1:]


def test_a_setting_changes_memory_at_once_and_the_rest_after(panel: LiveLab) -> None:
    figures = [panel.memory.figure, panel.attention.figure, panel.quality.figure, panel.memory.scale_figure]
    before, row = panel.shown["prediction"].total, panel.row
    start = time.perf_counter()
    with WORK:  # another panel is at work
        panel.controls.keep.settings["budget"].value = 64
        assert panel.sketch.wait(LONG)
        assert time.perf_counter() - start < 3  # 0.3 s on a quiet machine
        assert panel.shown["prediction"].total < before
        assert panel.memory.text.startswith("Predicted: ")
        assert panel.quality.state == "waiting"
    assert panel.wait(LONG)
    assert panel.row.memory.stored == 64
    assert panel.row.memory.allocated < row.memory.allocated
    assert panel.memory.text.startswith("Measured: ")
    assert figures == [panel.memory.figure, panel.attention.figure, panel.quality.figure, panel.memory.scale_figure]


def test_the_same_run_again_is_remembered_unless_run_is_pressed(panel: LiveLab) -> None:
    first = panel.shown["ran"]
    panel.controls.keep.settings["budget"].value = 64
    panel.wait(LONG)
    panel.controls.keep.settings["budget"].value = 96
    panel.wait(LONG)
    assert panel.shown["ran"] is first
    panel.run.click()
    panel.wait(LONG)
    assert panel.shown["ran"] is not first
    assert panel.shown["ran"].generation.text == first.generation.text


def test_a_fast_drag_runs_once_or_twice_and_shows_the_last(panel: LiveLab) -> None:
    started = panel.runner.started
    for budget in range(146, 96, -1):
        panel.controls.keep.settings["budget"].value = budget
    assert panel.wait(LONG)
    assert panel.runner.started - started <= 3
    assert panel.row.strategy.keep.budget == 97
    assert states(panel) == {"fresh"}


# errors, cancelling


def test_settings_that_do_not_go_together_are_one_red_line(panel: LiveLab) -> None:
    panel.controls.keep.settings["budget"].value = 32
    assert panel.wait(LONG)
    line = panel.error.value
    assert "HeavyHitter: budget=32 is below recent + sinks = 36" in line
    assert "<details>" in line
    assert "Traceback" in line
    assert states(panel) == {"stale"}
    panel.controls.keep.settings["recent"].value = 16
    assert panel.wait(LONG)
    assert panel.error.value == ""
    assert states(panel) == {"fresh"}
    assert panel.row.memory.stored == 32


def test_an_error_during_a_drag_is_not_hidden_by_the_cancelled_run(panel: LiveLab) -> None:
    for budget in (80, 60, 40, 32):
        panel.controls.keep.settings["budget"].value = budget
    assert panel.wait(LONG)
    assert "budget=32" in panel.error.value
    assert panel.stage.value != "cancelled"
    assert states(panel) == {"stale"}


def test_a_strategy_that_does_not_fit_the_model(panel: LiveLab) -> None:
    panel.strategy = Strategy(store=store.Int(group_size=12))
    assert panel.wait(LONG)
    assert "group_size=12 does not divide the head dim 16" in panel.error.value
    assert panel.quality.state == "stale"
    panel.strategy = SMALL
    assert panel.wait(LONG)
    assert panel.error.value == ""


def test_an_error_in_the_middle_of_a_run(panel: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the disk is <full>")

    with monkeypatch.context() as patch:
        patch.setattr("kvlab.measure.session.quality", broken)
        panel.controls.keep.settings["budget"].value = 80
        assert panel.wait(LONG)
    assert "the disk is &lt;full&gt;" in panel.error.value
    assert [card.state for card in panel.cards] == ["fresh", "fresh", "stale", "fresh", "stale"]
    panel.run.click()
    assert panel.wait(LONG)
    assert states(panel) == {"fresh"}


def test_offloading_to_where_nothing_can_be_written(panel: LiveLab) -> None:
    panel.controls.place.choice.value = "Offload"
    panel.controls.place.settings["folder"].value = "/nonexistent/folder"
    assert panel.wait(LONG)
    assert "cannot write in the folder" in panel.error.value
    panel.controls.place.settings["folder"].value = ""
    assert panel.wait(LONG)
    assert panel.error.value == ""
    assert "of it on disk" in panel.memory.text


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("", "is empty"), ("x" * 600, "more than the model's context"), ("x" * 500, "more than the model's context")],
)
def test_prompts_that_cannot_be(panel: LiveLab, prompt: str, said: str) -> None:
    panel.text.value = prompt
    assert panel.wait(LONG)
    assert said in panel.error.value
    panel.text.value = PROMPT
    assert panel.wait(LONG)
    assert panel.error.value == ""


def test_a_prompt_of_one_token(panel: LiveLab) -> None:
    panel.text.value = "x"
    assert panel.wait(LONG)
    assert panel.error.value == ""
    assert "nothing to score" in panel.quality.text
    assert panel.row.kl is None
    assert states(panel) == {"fresh"}


def hold(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let the next scoring wait: (has begun, may go on)."""
    begun, go_on = threading.Event(), threading.Event()
    from kvlab.measure import session

    real = session.quality

    def slow(*values: Any, progress: Callable[..., None], **named: Any) -> Any:
        begun.set()
        go_on.wait(LONG)
        progress("scoring", 1, 2)
        return real(*values, progress=progress, **named)

    monkeypatch.setattr(session, "quality", slow)
    return begun, go_on


def test_cancel_ends_a_run_and_marks_what_it_left(panel: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = hold(monkeypatch)
    panel.controls.keep.settings["budget"].value = 80
    assert begun.wait(LONG)
    assert not panel.cancel.disabled
    panel.cancel.click()
    go_on.set()
    assert panel.wait(LONG)
    assert panel.stage.value == "cancelled"
    assert panel.error.value == ""
    assert [card.state for card in panel.cards] == ["fresh", "fresh", "stale", "fresh", "stale"]
    assert panel.cancel.disabled


def test_a_newer_value_ends_the_run_before(panel: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = hold(monkeypatch)
    panel.controls.keep.settings["budget"].value = 80
    assert begun.wait(LONG)
    panel.controls.keep.settings["budget"].value = 64
    go_on.set()
    assert panel.wait(LONG)
    assert panel.row.memory.stored == 64
    assert states(panel) == {"fresh"}


def test_two_panels_do_not_mix(tiny_lab: Lab) -> None:
    one = LiveLab(tiny_lab, prompt=PROMPT, strategy=SMALL)
    two = LiveLab(tiny_lab, prompt=PROMPT[:100], strategy=Strategy(store=store.Int(bits=8, group_size=16)))
    assert one.wait(LONG)
    assert two.wait(LONG)
    assert one.row.strategy == SMALL
    assert one.row.tokens == len(PROMPT) + 23
    assert two.row.strategy.store.bits == 8
    assert two.row.tokens == 123
    assert one.error.value == two.error.value == ""


# single controls


def test_the_views_of_attention(tiny_lab: Lab) -> None:
    """Of more tokens than a picture has cells."""
    panel = LiveLab(tiny_lab, prompt=PROMPT * 2, strategy=SMALL)
    assert panel.wait(LONG)
    heat = style.trace(panel.attention.figure, "value")
    started = panel.runner.started
    panel.attention.view.value = "whole"
    assert heat.z.shape == (256, 256)
    panel.attention.view.value = "keys"
    assert heat.z.shape == (16, 256)
    assert "KV head 1: the keys that are kept are off by" in panel.attention.text
    panel.attention.head.value = 0
    assert "KV head 0" in panel.attention.text
    assert panel.runner.started == started  # all heads were recorded
    panel.attention.view.value = "steps"
    panel.attention.layer.value = 0
    assert panel.wait(LONG)
    assert panel.attention.text.startswith("Layer 0, head 0")


def test_nothing_is_lost_where_everything_is_kept(panel: LiveLab) -> None:
    panel.strategy = Strategy()
    panel.attention.view.value = "keys"
    assert panel.wait(LONG)
    assert "are exact; no token was evicted" in panel.attention.text
    assert panel.says.text == "It says the same as the full cache."
    assert "KL 0 nats, 100% agree" in panel.quality.text


def test_scaling_to_a_big_model(panel: LiveLab) -> None:
    panel.strategy = Strategy(store=store.Int(bits=4, group_size=16))
    assert panel.sketch.wait(LONG)
    panel.memory.model.value = "Llama-3.1-70B"
    assert panel.memory.devices.value == 4
    assert "Llama-3.1-70B on 4 × H100 SXM 80GB, 16 requests of 131,072 tokens" in panel.memory.scale_summary.value
    assert "the limit is" in panel.memory.scale_summary.value
    panel.memory.requests.value = 1
    assert "fits" in panel.memory.scale_summary.value
    panel.controls.place.choice.value = "Offload"
    assert panel.sketch.wait(LONG)
    assert "of KV wait elsewhere" in panel.memory.scale_summary.value
    panel.strategy = Strategy(store=store.Int(bits=4, group_size=64))
    panel.memory.model.value = "Phi-3-mini-4k"
    assert "does not divide the head dim 96" in panel.memory.scale_summary.value
    assert not any(trace.visible for trace in panel.memory.scale_figure.data)
    assert panel.wait(LONG)
    assert panel.error.value == ""  # the run here is fine: the head dim is 16, and the group shrinks to it


def test_pin_and_compare(panel: LiveLab) -> None:
    panel.pin.value = True
    panel.controls.keep.settings["budget"].value = 48
    assert panel.wait(LONG)
    assert list(panel.table.rows) == ["full", "A", "B"]
    assert panel.table.rows["A"].memory.stored == 96
    assert panel.table.rows["B"].memory.stored == 48
    assert style.trace(panel.memory.figure, "A, pinned").visible is True
    assert style.trace(panel.quality.figure, "A: KL, mean of 16").visible is True
    assert ">A</b>" in panel.says.lines.value
    panel.pin.value = False
    assert list(panel.table.rows) == ["full", "this"]
    assert style.trace(panel.memory.figure, "A, pinned").visible is False


def test_the_code_runs_and_makes_the_same(panel: LiveLab) -> None:
    panel.code.value = True
    code = panel.code_text.value
    assert panel.code_text.layout.display is None
    line = next(line for line in code.splitlines() if line.startswith("strategy = "))
    assert eval(line.removeprefix("strategy = "), {"kvlab": kvlab, "keep": keep, "store": store, "place": place}) == SMALL
    compile(code, "<copied>", "exec")
    panel.controls.keep.settings["budget"].value = 80
    assert "budget=80" in panel.code_text.value


def test_reset_goes_back_to_the_start(panel: LiveLab) -> None:
    panel.controls.keep.choice.value = "Window"
    panel.pin.value = True
    panel.text.value = "something else entirely"
    panel.code.value = True
    panel.reset.click()
    assert panel.wait(LONG)
    assert panel.strategy == panel.row.strategy == SMALL
    assert panel.text.value == PROMPT
    assert not panel.pin.value
    assert panel.code_text.layout.display == "none"
    assert list(panel.table.rows) == ["full", "this"]


def test_shipped_prompts_and_ones_own(panel: LiveLab) -> None:
    assert [value for _, value in panel.prompt.options] == ["reference", "story", "question", "own text"]
    panel.text.value = "another text, long enough to be scored"
    assert panel.prompt.value == "own text"
    panel.prompt.value = "story"
    assert panel.text.value.startswith("Once upon a time")
    panel.prompt.value = "own text"
    assert panel.text.value == "another text, long enough to be scored"
    assert panel.edit.value
    assert panel.text.layout.display is None


def test_another_model_is_loaded_and_a_bad_one_said(panel: LiveLab, tiny_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, **_: Any) -> Lab:
        if name == "bad":
            raise kvlab.UnsupportedModel("bad: no KV cache (looked for num_hidden_layers)")
        return Lab(name, tiny_lab.model, tiny_lab.tokenizer)

    monkeypatch.setattr("kvlab.lab.load", load)
    panel.model.value = "another …"
    assert panel.folder.layout.display is None
    panel.folder.value = "bad"
    assert panel.wait(LONG)
    assert "bad: no KV cache" in panel.error.value
    panel.folder.value = "good"
    assert panel.wait(LONG)
    assert panel.error.value == ""
    assert panel._session is not None
    assert panel._session.lab.name == "good"
    panel.code.value = True
    assert "kvlab.load('good')" in panel.code_text.value


def test_a_prefill_in_pieces_lowers_the_peak(panel: LiveLab) -> None:
    whole = panel.row.memory.high_water
    panel.controls.chunk.value = 64
    assert panel.wait(LONG)
    assert panel.row.strategy.chunk == 64
    assert panel.row.memory.high_water < whole / 2
    assert len(panel.shown["ran"].generation.growth) > 5


# what a panel leaves in a notebook


def test_its_text_says_what_it_shows(panel: LiveLab) -> None:
    text = repr(panel)
    assert text.startswith("LiveLab: HeavyHitter(budget=96")
    assert panel.quality.text in text
    assert f"this: cache {geometry.text(panel.row.memory.allocated)}, of 16-bit" in text


def test_it_adds_a_picture_only_when_asked(panel: LiveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "image/png" not in panel._repr_mimebundle_()
    monkeypatch.setenv("KVLAB_PICTURES", "1")
    monkeypatch.setattr("kvlab.panels.live_lab.sheet", lambda columns: b"picture of %d" % sum(map(len, columns)))
    bundle = panel._repr_mimebundle_()
    assert bundle["image/png"] == "cGljdHVyZSBvZiA0"
    assert bundle["text/plain"] == repr(panel)


# controls made from declarations


@pytest.mark.parametrize("axis", AXES)
def test_every_setting_of_every_method_has_a_control(axis: str) -> None:
    told: list[int] = []
    controls = StrategyControls(Strategy(), lambda: told.append(1))
    group = getattr(controls, axis)
    for name, cls in methods(axis).items():
        group.choice.value = name
        assert set(group.settings) == set(cls.settings())
        assert group.read() == cls()
        for key, setting in cls.settings().items():
            widget = group.settings[key]
            if isinstance(widget, MethodControls):
                assert widget.tooltip is None  # a box with one is an error in the browser
                assert (widget.choice.tooltip, widget.label) == (setting.help, setting.title)
                continue
            assert widget.tooltip == setting.help
            assert (setting.title or key.replace("_", " ")) in widget.description
            if setting.unit:
                assert setting.unit in widget.description
            if hasattr(widget, "continuous_update"):
                assert widget.continuous_update is False
    assert len(told) >= len(methods(axis)) - 1


def test_controls_follow_a_strategy_silently_and_remember_settings() -> None:
    told: list[int] = []
    controls = StrategyControls(Strategy(), lambda: told.append(1))
    for strategy in (
        Strategy(keep=keep.Window(size=1000, sinks=0), chunk=512),
        Strategy(store=store.Int(bits=2, group_size=48, key_axis="token"), place=place.Offload(to="disk", folder="/tmp")),
    ):
        controls.show(strategy)
        assert controls.read() == strategy
    assert not told
    controls.keep.choice.value = "Window"
    assert controls.read().keep == keep.Window(size=1000, sinks=0)
    assert told == [1]


@pytest.mark.parametrize("budget", [0.25, "4 MB"])
def test_a_budget_that_is_no_number_of_tokens_is_kept_until_its_slider_is_moved(budget: float | str) -> None:
    told: list[int] = []
    controls = MethodControls("keep", keep.HeavyHitter(budget=budget), lambda: told.append(1))
    slider = controls.settings["budget"]
    assert controls.read() == keep.HeavyHitter(budget=budget) and str(budget) in slider.description and not told
    slider.value = 512
    assert controls.read() == keep.HeavyHitter(budget=512) and slider.description == "budget (tokens)" and len(told) == 1
    controls.show(keep.HeavyHitter(budget=budget))
    controls.show(keep.HeavyHitter(budget=128))
    assert controls.read() == keep.HeavyHitter(budget=128) and len(told) == 1


def test_sliders_of_tokens_end_where_the_sequence_is_covered() -> None:
    controls = StrategyControls(Strategy(keep=keep.HeavyHitter()), lambda: None)
    controls.limit(533)
    budget = controls.keep.settings["budget"]
    assert (budget.min, budget.max, budget.step, budget.value) == (16, 544, 16, 256)
    assert controls.keep.settings["sinks"].max == 64
    assert controls.chunk.max == 576
    controls.limit(100)
    assert budget.max == 256  # never below what it says


def test_kinds_of_controls() -> None:
    made = {
        "doublings": control("group_size", Setting(low=8, high=1024, step=8, unit="numbers"), 64, lambda: None),
        "share": control("share", Setting(low=0.0, high=1.0, step=0.1), 0.5, lambda: None),
        "flag": control("flag", Setting(), True, lambda: None),
        "many": control("many", Setting(choices=tuple(range(9))), 3, lambda: None),
        "few": control("few", Setting(choices=(8, 4)), 8, lambda: None),
        "words": control("words", Setting(), "", lambda: None),
    }
    kinds = [
        widgets.SelectionSlider,
        widgets.FloatSlider,
        widgets.Checkbox,
        widgets.Dropdown,
        widgets.ToggleButtons,
        widgets.Text,
    ]
    assert [type(widget) for widget in made.values()] == kinds
    assert made["doublings"].options == (8, 16, 32, 64, 128, 256, 512, 1024)
