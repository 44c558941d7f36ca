"""The project's own promises: pins agree, notebooks are light, no room imports upwards, `import kvlab` needs little."""

import ast
import fnmatch
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SIX = ("jupyterlab", "ipywidgets", "torch", "transformers", "plotly", "nbval")


# Pins


def pins() -> dict[str, str]:
    """constraints.txt: package -> exact version."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    return {str(canonicalize_name(name)): version for name, version in pairs}


def requirements() -> list[Requirement]:
    """Everything that pyproject.toml asks for, in any extra."""
    project = PROJECT["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return [requirement for requirement in map(Requirement, texts) if requirement.name != "kvlab"]


def environment() -> tuple[list[str], list[str]]:
    """environment.yml: what conda installs, what pip installs."""
    found = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return [entry for entry in found if isinstance(entry, str)], next(entry["pip"] for entry in found if isinstance(entry, dict))


def test_every_requirement_is_pinned_within_its_range() -> None:
    pinned = pins()
    for requirement in requirements():
        version = pinned.get(str(canonicalize_name(requirement.name)))
        assert version, f"{requirement.name} is not in constraints.txt"
        assert version in requirement.specifier, f"{requirement} does not allow {version}"


def test_the_conda_environment_agrees() -> None:
    conda, pip = environment()
    pinned, asked = pins(), {str(canonicalize_name(requirement.name)) for requirement in requirements()}
    listed = {line.partition("==")[0]: line.partition("==")[2] for line in pip if "==" in line}
    assert set(SIX) <= listed.keys()
    for name, version in listed.items():
        assert version == pinned[name], name
        assert name in asked, f"{name} is not in pyproject.toml"
    assert "-c constraints.txt" in pip
    assert any(line.startswith("-e .[lab") for line in pip)
    (python,) = [entry.removeprefix("python=") for entry in conda if entry.startswith("python=")]
    assert f"{python}.0" in Requirement(f"x{PROJECT['project']['requires-python']}").specifier


def test_the_base_is_torch_and_transformers() -> None:
    assert {Requirement(text).name for text in PROJECT["project"]["dependencies"]} == {
        "torch",
        "transformers",
        "safetensors",
        "tqdm",
    }


def test_no_pin_is_tied_to_a_machine() -> None:
    assert all("+" not in version for version in pins().values())
    assert "://" not in (ROOT / "constraints.txt").read_text()


def test_no_pin_shuts_out_an_older_patch_of_python() -> None:
    """Debian 12 has Python 3.11.2; some packages ask for 3.11.5."""
    for name, version in pins().items():
        try:
            found = metadata(name)
        except PackageNotFoundError:
            continue  # another system's
        if found["Version"] == version and (allowed := found["Requires-Python"]):
            assert all(python in SpecifierSet(allowed) for python in ("3.11.0", "3.12.0", "3.13.0")), f"{name}: {allowed}"


def test_the_version_is_told_once() -> None:
    version = PROJECT["project"]["version"]
    assert f'__version__ = "{version}"' in (ROOT / "kvlab" / "__init__.py").read_text()
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_data_file_is_installed() -> None:
    patterns = [pattern for globs in PROJECT["tool"]["setuptools"]["data-files"].values() for pattern in globs]
    for path in (ROOT / "data").rglob("*"):
        name = path.relative_to(ROOT).as_posix()
        covered = any(fnmatch.fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)
        assert path.is_dir() or covered, f"{name} matches no pattern under data-files in pyproject.toml"


# Notebooks

NOTEBOOKS = [path for path in sorted((ROOT / "notebooks").rglob("*.ipynb")) if ".ipynb_checkpoints" not in path.parts]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_light_and_carries_no_widget_state(path: Path) -> None:
    assert path.stat().st_size <= 500_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert "widgets" not in notebook["metadata"]
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", output.get("ename")
            assert not {kind for kind in output.get("data", {}) if "widget" in kind}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


# Who may import whom

LEVELS: list[set[str]] = [
    {"errors", "_data", "_config", "jupyter", "timeline", "dispatch"},
    {"strategy", "buffer", "memory", "geometry", "fetch", "texts", "rope"},
    {"hardware", "models"},
    {"keep", "store", "place"},
    {"attention", "history", "saving"},
    {"layer"},
    {"cache"},
    {"chat", "parking", "replay"},
    {"lab"},
    {"serving"},
    {"measure"},
    {"advise", "export", "plots"},
    {"panels"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
KERNEL_USERS = {"dispatch", "store", "attention", "measure", "serving"}
PLOTS_NEVER = {
    "ipywidgets",
    "anywidget",
    "IPython",
    "transformers",
    "kvlab.models",
    "kvlab.lab",
    "kvlab.cache",
    "kvlab.attention",
}


def test_the_rooms_are_known() -> None:
    rooms = {path.stem for path in (ROOT / "kvlab").iterdir() if path.suffix == ".py" or any(path.glob("*.py"))} - {"__init__"}
    assert rooms <= LEVEL.keys(), "give the new room its level in LEVELS"


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports at run time, anywhere in it, by its full name."""
    package = ["kvlab", *path.relative_to(ROOT / "kvlab").parts[:-1]] if ROOT / "kvlab" in path.parents else ["kvlab_kernels"]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module or ""
            )
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


FILES = [path for path in sorted((ROOT / "kvlab").rglob("*.py")) if path != ROOT / "kvlab" / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_imports_upwards(path: Path) -> None:
    room = path.relative_to(ROOT / "kvlab").parts[0].removesuffix(".py")
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "kvlab_kernels":
            assert room in KERNEL_USERS, f"only {', '.join(sorted(KERNEL_USERS))} may import {name}"
        elif top == "kvlab":
            target = rest.split(".")[0]
            level = LEVEL.get(target, LEVEL["lab"])  # a name of kvlab/__init__.py itself, which imports up to lab
            assert target == room or level < LEVEL[room], f"{room} imports {name}, which is not below it"
        assert room != "plots" or not within(name, PLOTS_NEVER), f"plots imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_kernels_stand_alone(path: Path) -> None:
    assert not [name for name in imports(path) if within(name, {"kvlab", "transformers"})]


def test_there_is_no_root_package_called_kernels() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kvlab_imports_with_torch_and_transformers_only() -> None:
    code = """
import sys
blocked = "plotly ipywidgets anywidget pandas triton typer IPython jupyterlab nbval kaleido gguf accelerate pytest".split()
sys.modules.update(dict.fromkeys(blocked))  # None: an import of it raises ModuleNotFoundError
import kvlab, kvlab.cli, kvlab.geometry, kvlab.models, kvlab.texts
print("ready", kvlab.Strategy() == kvlab.Strategy())
try:
    kvlab.cli.main()
except SystemExit as error:
    print(error)
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert "ready True" in run.stdout
    assert "kvlab: typer is missing: pip install 'kvlab[lab]'" in run.stdout
