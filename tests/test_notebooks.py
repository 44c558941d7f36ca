"""The course has one shape: questions with a prediction that is kept, what should have been seen, exercises with a check, what to take away, sources."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COURSE = sorted((ROOT / "notebooks").glob("[01]*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    return [
        "".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind
    ]


def test_there_are_twelve() -> None:
    assert [path.name[:2] for path in COURSE] == [f"{number:02}" for number in range(12)]


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_it_has_the_shape_of_all(path: Path) -> None:
    words, code = "\n\n".join(cells(path, "markdown")), cells(path, "code")
    assert re.match(rf"# {path.name[:2]} \w", words)
    assert re.search(r"\b[Aa]bout \d\d minutes\b", words)
    # each prediction that is kept is asked for in words, and comes out in a later cell
    made = {name: at for at, cell in enumerate(code) for name in re.findall(r"^(guess\d?) = Predict\(", cell, re.M)}
    seen = {name: at for at, cell in enumerate(code) for name in re.findall(r"\b(guess\d?)\.seen\(", cell)}
    assert len(made) >= 3 and made.keys() == seen.keys()
    assert all(made[name] < seen[name] for name in made)
    assert words.count("**Predict") >= len(made)
    assert words.count("What you should have seen") >= 3
    exercises = re.findall(r"^## Exercise (\d) \((★{1,3}), (\d+) minutes\)$", words, re.M)
    assert 1 <= len(exercises) <= 4 and [int(number) for number, _, _ in exercises] == list(range(1, len(exercises) + 1))
    assert sum('"right"' in cell for cell in code) >= 1
    assert "## Take it away" in words and "**Sources.**" in words
    solutions = path.parent / "solutions" / path.name
    assert solutions.is_file() == (f"solutions/{path.name}" in words)
    assert solutions.is_file() or "<summary>Solution</summary>" in words
    own = {"02": "MODEL, DEVICE = ", "10": "MODEL = "}.get(path.name[:2], "MODEL, TEXT, DEVICE = ")  # these two load no model
    assert "# Bring your own: " in code[0] and f"\n{own}" in code[0]
    assert sum(bool(re.search(r"\b(MODEL|lab)\b", cell)) for cell in code[1:]) >= 1  # and what follows takes it


def test_no_prediction_has_the_name_of_another() -> None:
    asked = [name for path in COURSE for cell in cells(path, "code") for name in re.findall(r'Predict\("([^"]+)"', cell)]
    twice = {name for name in asked if asked.count(name) > 1}
    assert not twice - {"loses least"}, "they share a line of the reader's table"
