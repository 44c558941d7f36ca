"""The memory figures: what is drawn, in which hue and unit, and that an update changes a figure in place."""

import pytest

pytest.importorskip("plotly")
import plotly.graph_objects as go

from kvlab import geometry, hardware
from kvlab.plots import memory, style

TOKENS = [0, 1024, 2048]
FULL = [0, 23_592_960, 47_185_920]


def y(fig: go.Figure, name: str) -> list[float]:
    return list(style.trace(fig, name).y)


def test_growth_draws_the_full_cache_the_parts_and_the_points() -> None:
    parts = {"codes": [0, 11e6, 22e6], "evidence": [0, 1e6, 2e6]}
    fig = memory.growth(TOKENS, FULL, parts, measured=([2048], [24.1e6]), high_water=30e6)
    assert style.trace(fig, "full cache").line.color == style.FULL
    assert y(fig, "full cache") == pytest.approx([0, 23.59296, 47.18592])
    assert style.trace(fig, "codes").fillcolor == style.STORE
    assert style.trace(fig, "evidence").fillcolor == style.KEEP
    assert style.trace(fig, "codes").stackgroup == style.trace(fig, "evidence").stackgroup
    assert y(fig, "measured") == [24.1]
    assert y(fig, "high-water mark") == [30, 30]
    assert fig.layout.yaxis.title.text == "cache (MB)"
    assert "tokens" in fig.layout.xaxis.title.text


def test_growth_is_updated_in_place() -> None:
    fig = go.FigureWidget(memory.growth(TOKENS, FULL, {"codes": [0, 1e6, 2e6]}, high_water=3e6))
    before = style.trace(fig, "codes")
    memory.update_growth(fig, TOKENS, FULL, {"keys": [0, 5e6, 6e6]}, measured=([2048], [6e6]), title="dense")
    assert style.trace(fig, "codes") is before
    assert before.visible is False
    assert style.trace(fig, "high-water mark").visible is False
    assert y(fig, "keys") == [0, 5, 6]
    memory.update_growth(fig, TOKENS, FULL, {"codes": [0, 2e6, 4e6]})
    assert before.visible is True
    assert y(fig, "codes") == [0, 2, 4]
    assert style.trace(fig, "keys").visible is False
    assert fig.layout.title.text == "dense"
    assert len(fig.data) == 5  # nothing is added twice


def test_growth_of_nothing_and_of_columns_that_differ() -> None:
    memory.growth([], [], {})
    with pytest.raises(ValueError, match=r"columns of different length.*'codes': 1"):
        memory.growth(TOKENS, FULL, {"codes": [1]})


def test_growth_summary() -> None:
    line = memory.growth_summary(47_185_920, 12_533_760, 2048, high_water=16e6)
    assert line == "26.6% of 16-bit at 2,048 tokens: 12.5 MB, the full cache 47.2 MB; high-water mark 16.0 MB"
    assert memory.growth_summary(94_371_840, 47_185_920, 2048, sixteen_bit=47_185_920).startswith("100.0% of 16-bit")


def test_scale_up_marks_where_it_no_longer_fits() -> None:
    model, device = geometry.find("Llama-3.1-8B"), hardware.find("h100")
    grid = geometry.grid(131_072, 9)
    fits = geometry.max_tokens(model, device, requests=16)
    fig = memory.scale_up(grid, geometry.curve(model, grid, requests=16), device.capacity(), fits=fits, here=65_536)
    assert y(fig, "weights") == pytest.approx([16.060522496] * 9)
    assert y(fig, "capacity") == [80, 80]
    over = style.trace(fig, "does not fit")
    assert over.line.color == style.DANGER
    assert (over.x[0], over.y[0]) == (fits, 80)
    assert style.trace(fig, "chosen").marker.color == style.DANGER  # 64K x 16 requests is too much
    assert f"fits up to {fits:,} tokens" in [note.text for note in fig.layout.annotations]
    assert style.trace(fig, "state") is None


def test_scale_up_is_updated_in_place_and_can_fit_everywhere_or_nowhere() -> None:
    grid = geometry.grid(4096, 5)
    small, big = geometry.find("SmolLM2-135M"), geometry.find("Llama-3.1-405B")
    fig = go.FigureWidget(memory.scale_up(grid, geometry.curve(big, grid), 80e9, fits=0))
    assert "does not fit at all" in [note.text for note in fig.layout.annotations]
    memory.update_scale_up(fig, grid, geometry.curve(small, grid), 80e9, full=geometry.curve(small, grid), fits=3_400_000)
    assert style.trace(fig, "does not fit").visible is False
    assert len(fig.layout.annotations) == 1
    assert style.trace(fig, "with the full cache").line.color == style.FULL


def test_scale_up_summary() -> None:
    parts = geometry.Breakdown(weights=16 * 10**9, kv=43 * 10**9, state=0, activations=10**9)
    assert memory.scale_up_summary(parts, 80e9, 131_072, 2, fits=200_000) == (
        "2 requests of 131,072 tokens, predicted: 60.0 GB of 80.0 GB (weights 16.0 GB, KV 43.0 GB, activations about 1.00 GB): "
        "fits; the limit is 200,000 tokens"
    )
    assert memory.scale_up_summary(parts, 10e9, 1, fits=0).endswith("does not fit; the weights alone are too much")
    assert memory.scale_up_summary(parts, 80e9, 1, fits=None).endswith("fits; no length is too long")


def test_models_are_named_at_their_ends_and_the_state_space_is_flat() -> None:
    names, tokens = ["Llama-2-7B", "Llama-3.1-8B", "Mamba-2.8B"], [1024, 4096, 16384]
    shapes = {name: geometry.find(name) for name in names}
    series = {name: [part.cache for part in geometry.curve(shape, tokens)] for name, shape in shapes.items()}
    fig = memory.models(tokens, series, {name: shape.kind for name, shape in shapes.items()})
    lines = {trace.meta: list(trace.y) for trace in fig.data}
    assert lines["Mamba-2.8B"] == [0.0131072] * 3
    assert {note.text for note in fig.layout.annotations} == set(names)
    assert {trace.line.color for trace in fig.data} == {style.FULL, style.SKY, style.STATE}
    assert (fig.layout.xaxis.type, fig.layout.yaxis.type) == ("log", "log")
    line = memory.models_summary(16_384, {name: values[-1] for name, values in series.items()})
    assert line == "At 16,384 tokens a sequence keeps from 13.1 MB (Mamba-2.8B) to 8.59 GB (Llama-2-7B)."


def test_reserved_and_used() -> None:
    fig = memory.reserved_vs_used(40e9, [1e9, 40e9])
    assert [list(trace.x) for trace in fig.data] == [[1, 40], [39, 0]]
    assert "GB" in fig.layout.xaxis.title.text
    assert memory.reserved_vs_used_summary(40e9, [1e9, 40e9]) == "2 requests: reserved 80.0 GB, used 41.0 GB (51.2%)"
    with pytest.raises(ValueError, match=r"used=50; allowed: 0 to the 40 bytes"):
        memory.reserved_vs_used(40, [50])


def test_units_and_token_counts_for_people() -> None:
    assert [style.unit(value)[1] for value in (10, 5e3, 5e6, 5e9, 5e12, 5e13)] == ["B", "kB", "MB", "GB", "GB", "TB"]
    assert [style.tokens(count) for count in (512, 1024, 1536, 131_072, 1 << 20)] == ["512", "1K", "1,536", "128K", "1M"]


def test_the_calculator_follows_its_controls() -> None:
    pytest.importorskip("ipywidgets")
    from kvlab.panels.memory import MemoryCalculator

    panel = MemoryCalculator()
    figure, weights = panel.figure, style.trace(panel.figure, "weights")
    assert "1 request of 131,072 tokens, predicted: 33.5 GB of 80.0 GB" in panel.summary.value
    panel.requests.value = 16
    assert "does not fit" in panel.summary.value
    panel.bits.value, panel.context.value = 4, 65_536
    assert "fits; the limit is" in panel.summary.value
    panel.model.value = "Llama-3.1-70B"
    assert panel.kv_heads.value == 8
    panel.kv_heads.value = 64
    assert "Llama-3.1-70B with 64 KV heads on 1 x H100" in panel.figure.layout.title.text
    panel.model.value = "Mamba-2.8B"
    assert panel.kv_heads.disabled
    assert "no length is too long" in panel.summary.value
    assert (panel.figure, style.trace(panel.figure, "weights")) == (figure, weights)  # updated, never rebuilt
    assert panel.error.value == ""


def test_the_calculator_says_what_went_wrong_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    from kvlab.panels.memory import MemoryCalculator

    panel = MemoryCalculator()
    with monkeypatch.context() as patch:
        patch.setattr(geometry, "curve", lambda *_, **__: 1 / 0)
        panel.requests.value = 2
        assert style.DANGER in panel.error.value
        assert "division by zero" in panel.error.value
        assert "<details>" in panel.error.value
    panel.requests.value = 3
    assert panel.error.value == ""
    assert "3 requests" in panel.summary.value
