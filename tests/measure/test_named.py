"""Strategies with names, and what was recorded of them: every method has one, and bytes are what was predicted before anything ran."""

from pathlib import Path

import pytest

from kvlab import Strategy, geometry
from kvlab.measure import predict, predict_high_water
from kvlab.measure.experiment import recorded
from kvlab.measure.named import TASKS, name_of, named
from kvlab.strategy import AXES, methods

TEXT = [row for row in recorded() if row.task["task"] == "Text" and row.score is not None]
SHAPE = geometry.find("SmolLM2-135M")


def inside(part: object) -> set[str]:
    """The names of a method and of those that are its settings."""
    return {type(part).__name__}.union(
        *(inside(getattr(part, name)) for name in part.settings() if hasattr(getattr(part, name), "axis"))
    )


@pytest.mark.parametrize("axis", AXES)
def test_every_method_has_a_named_strategy(axis: str) -> None:
    used = set().union(*(inside(getattr(strategy, axis)) for strategy in named().values()))
    shipped = {name for name, method in methods(axis).items() if method.__module__.startswith("kvlab.")}
    assert shipped <= used


def test_names_are_of_one_strategy_each() -> None:
    assert len(set(named().values())) == len(named()) == 60
    assert all(name_of(strategy.to_dict()) == name for name, strategy in named().items())
    assert name_of(Strategy(chunk=64).to_dict()) == "chunk=64"


def test_all_of_them_were_recorded() -> None:
    have = {(name_of(row.settings), str(row.task["task"])) for row in recorded()}
    assert have >= {(name, type(task).__name__) for name in named() for task in TASKS}
    assert all(row.score is not None or row.why for row in recorded())


@pytest.mark.parametrize("row", TEXT, ids=lambda row: name_of(row.settings))
def test_bytes_were_as_predicted(row) -> None:
    """On SmolLM2, 1,024 tokens at once and 1,024 more 16 at a time, float32: room to grow apart within 1%, the high-water mark within 5%.

    Where tokens are evicted from codes, how many of the newest are plain depends on the moment: half a group of 64 and a step of 16 more or less
    than is told.
    """
    strategy = Strategy.from_dict(row.settings)
    prompt, tokens = row.task["prefill"], row.task["prefill"] + row.task["scored"]
    want = [sum(predict(SHAPE, strategy, tokens, bits=32, tail=tail).values()) for tail in (0.0, 0.5, 1.0)]
    ragged = getattr(strategy.keep, "ragged", False)  # of each head's newest page some places may be empty
    if want[0] == want[2]:
        assert row.bytes_logical == pytest.approx(want[1], rel=0.03 if ragged else 0.01)
    else:
        assert abs(row.bytes_logical - want[1]) <= (32 + 16) * 30 * 3 * 128 * 4
    high = predict_high_water(SHAPE, strategy, prompt, tokens, step=row.task["step"], bits=32)
    assert row.bytes_high_water == pytest.approx(high, rel=0.05)


def test_high_water_by_hand() -> None:
    """A dense prompt lies beside all layers that are written; a window's prompt beside what is left of it; pieces bound both."""
    from kvlab import keep, place

    layer = 2 * 3 * 1000 * 64 * 4
    assert predict_high_water(SHAPE, Strategy(), 1000, bits=32) == 31 * layer
    window = Strategy(keep=keep.Window(size=96, sinks=4))
    columns = 100 * 4
    assert predict_high_water(SHAPE, window, 1000, bits=32) == 30 * (layer / 10 + columns) + layer
    in_pieces = predict_high_water(SHAPE, Strategy(keep=window.keep, chunk=100), 1000, bits=32, fused=True)
    assert in_pieces < 31 * (layer / 10 + columns) * 1.05
    away = predict_high_water(SHAPE, Strategy(place=place.Offload(prefetch=0)), 1000, bits=32)
    assert away == pytest.approx(2 * layer + 29 * layer * 8 / 1000)  # 8 tokens of each layer are no whole page
    for wrong, said in (
        ({"prompt": 0}, "prompt=0"),
        ({"prompt": 5, "tokens": 4}, "tokens=4"),
        ({"prompt": 5, "step": 0}, "step=0"),
    ):
        with pytest.raises(ValueError, match=said):
            predict_high_water(SHAPE, Strategy(), **wrong)


def test_readme_shows_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "tools"))
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert importlib.import_module("tables").written(readme) == readme, "python tools/tables.py"
