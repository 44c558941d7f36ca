"""The course has one shape: questions with a prediction that is kept, what should have been seen, exercises with a check, what to take away, sources."""

import json
import re
from pathlib import Path

import nbformat
import pytest
import torch

import kvlab

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


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model of another architecture: Qwen3's, 16 layers of 8 heads that share 4, random weights, SmolLM2's words."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    lab = kvlab.load("smollm2-135m")
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=lab.model.config.vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=8192, initializer_range=0.1, bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "another"
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    lab.tokenizer.save_pretrained(folder)
    return str(folder)


ERRORS = """
import gc, ipywidgets
found = [one for one in gc.get_objects() if issubclass(type(one), ipywidgets.Box) and hasattr(one, "error") and hasattr(one, "wait")]
assert all(one.wait(300) for one in found)
print([one.error.value for one in found if one.error.value])
"""


@pytest.mark.nightly
@pytest.mark.model
@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_it_runs_with_another_model(path: Path, another: str, tmp_path: Path) -> None:
    """What its first cell brings is taken by all that follows: no cell fails, and no panel."""
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.read(path, as_version=4)
    first = next(cell for cell in book.cells if cell.cell_type == "code")
    lines = first.source.split("\n")
    (at,) = [number for number, line in enumerate(lines) if re.match(r"MODEL\b.* = ", line)]
    if "TEXT" in lines[at]:
        lines[at] = f"from kvlab import texts\nMODEL, TEXT, DEVICE = {another!r}, texts.prompts()['story'] * 30, 'cpu'"
    else:
        lines[at] = lines[at].replace('"Llama-3.1-8B"', repr(another))
    first.source = "\n".join(lines)
    assert another in first.source
    book.cells.append(nbformat.v4.new_code_cell(ERRORS))
    nbclient.NotebookClient(book, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "".join(one.get("text", "") for one in book.cells[-1].outputs if one.get("name") == "stdout").strip() == "[]"
