"""Predictions: what is chosen is kept, what is seen stands beside it, and afterwards nobody was always right."""

import json

import pytest

pytest.importorskip("anywidget")
from kvlab.panels.predict import Predict, predictions


def test_a_prediction_is_kept_and_compared(tmp_path, capsys) -> None:
    path = tmp_path / "mine.jsonl"
    guess = Predict("room saved", 3, 3.5, 4, unit="times", out=path)
    assert predictions(path).empty and not path.exists()
    guess.choice = 4
    assert json.loads(path.read_text())["predicted"] == 4
    guess.seen(3.56)
    assert capsys.readouterr().out == "Predicted 4 times. room saved: about 3.5 times.\n"
    assert guess._radio.disabled
    guess.seen(3.56)  # the cell run again
    (row,) = predictions(path).to_dict("records")
    assert (row["predicted"], row["seen"], row["right"]) == ("4 times", "3.5 times", False)
    assert len(path.read_text().splitlines()) == 2


def test_nothing_predicted_nothing_written(tmp_path, capsys) -> None:
    guess = Predict("who is best", "H2O", "chance", out=tmp_path / "none.jsonl")
    guess.seen("H2O")
    assert capsys.readouterr().out == "Nothing predicted. who is best: H2O.\n"
    assert repr(guess) == "who is best: H2O / chance? Nothing predicted. who is best: H2O."
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "number", "nearest"),
    [((1, 10, 100), 31, 10), ((1, 10, 100), 32, 100), ((0, 10, 100), 56, 100), ((0, 10, 100), 54, 10), ((1, 10), -5.0, 1)],
)
def test_numbers_count_by_ratio_where_they_can(options, number, nearest, capsys) -> None:
    # 31 lies below the geometric middle of 10 and 100 (31.6), 32 above it; with a 0 the middle of 10 and 100 is 55
    Predict("it", *options, unit="%").seen(number)
    assert f"about {nearest}%" in capsys.readouterr().out


def test_right_is_right(tmp_path, capsys) -> None:
    guess = Predict("q", "yes", "no", out=tmp_path / "p")
    guess.choice = "no"
    guess.seen("no")
    assert capsys.readouterr().out == "Predicted no: right.\n"
    assert predictions(tmp_path / "p").right.tolist() == [True]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Predict("", 1, 2), "question is empty"),
        (lambda: Predict("q", 1), "allowed: 2 to 6"),
        (lambda: Predict("q", 1, 1), "all different"),
        (lambda: Predict("q", 1, "two"), "not both"),
        (lambda: Predict("q", 1, float("nan")), "finite numbers"),
        (lambda: Predict("q", "a", "b").seen("c"), "allowed: a, b"),
        (lambda: Predict("q", 1, 2).seen(float("inf")), "not a finite number"),
    ],
)
def test_what_cannot_be_is_said(make, words) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_a_folder_that_cannot_be_written_is_said(tmp_path) -> None:
    guess = Predict("q", "a", "b", out=tmp_path / "missing" / "p.jsonl")
    guess.choice = "a"
    assert "not kept: " in guess._told.value


def test_a_broken_line_is_named(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    Predict("q", "a", "b", out=path).choice = "a"
    path.write_bytes(path.read_bytes() + b"\n[]\n\xff\n")
    with pytest.warns(UserWarning, match="line [34] is no prediction") as said:
        table = predictions(path)
    assert len(said) == 2 and list(table["predicted"]) == ["a"]  # the others are not lost


def test_what_was_seen_stays_until_more_is_seen(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    made = Predict("q", "a", "b", out=path)
    made.choice = "a"
    made.seen("b")
    Predict("q", "a", "b", out=path).choice = "b"  # chosen again, not run again
    assert predictions(path).iloc[0][["predicted", "seen", "right"]].tolist() == ["a", "b", False]


def test_it_says_that_it_was_not_kept(tmp_path) -> None:
    made = Predict("q", "a", "b", out=tmp_path)  # a folder
    made.choice = "a"
    made.seen("a")
    assert "Predicted a: right." in made._told.value and "not kept: " in made._told.value
