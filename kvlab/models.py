"""Where a model comes from: the shipped name, a local folder, or a hub id.

`load_model` never runs code that a model brings along and reads safetensors only.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvlab.errors import DamagedModel, ModelUnavailable, UnsupportedModel
from kvlab.fetch import SMOLLM2, cache_dir, hub_snapshot, quiet_transformers, safetensors_header, smollm2

__all__ = ["DTYPES", "SMOLLM2", "cache_dir", "load_model", "resolve"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    name: str | os.PathLike[str] = SMOLLM2,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, without gradients, and its tokenizer, padding on the left.

    `name`: "smollm2-135m" (fetched once, 538 MB kept in `cache_dir()`), a folder in transformers' layout, or a hub id.
    `dtype`: float32, float16, bfloat16, or "auto" for the one it was saved in. `device`: None is the GPU if there is one.

    Raises `ValueError` for a wrong argument, `ModelUnavailable` when files cannot be had, `DamagedModel` when they are
    broken, `UnsupportedModel` when it is not a decoder language model that transformers knows.
    """
    kind, target = _dtype(dtype), _device(device)
    place = resolve(name)
    folder = _shipped(progress) if place == SMOLLM2 else place if isinstance(place, Path) else hub_snapshot(place, progress)
    _check_config(folder)
    _check_weights(folder)
    return _read_model(folder, kind).to(target), _read_tokenizer(folder)  # type: ignore[arg-type]


def resolve(name: str | os.PathLike[str]) -> Path | str:
    """A folder as `Path`, the shipped name or a hub id as `str`. Looks at the disk, never at the network.

    A shipped name wins over a folder of that name: write `./smollm2-135m` for the folder.
    """
    text = os.fspath(name)
    if isinstance(name, str) and name.lower() == SMOLLM2:
        return SMOLLM2
    if not text.strip():
        raise ValueError(f"model {name!r}: give {SMOLLM2!r}, a folder, or a hub id such as 'org/name'")
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelUnavailable(f"{path} is a file; a model is a folder with config.json, tokenizer and *.safetensors")
    if not isinstance(name, str) or text.startswith((".", "~", "/")) or path.is_absolute() or text.count("/") > 1:
        raise ModelUnavailable(f"no folder {path}")
    return text


def _shipped(progress: bool) -> Path:
    return smollm2(progress)


def _dtype(value: torch.dtype | str) -> torch.dtype | str:
    if value == "auto" or value in DTYPES.values():
        return value
    if isinstance(value, str) and value in DTYPES:
        return DTYPES[value]
    raise ValueError(f"dtype {value!r}: allowed are {', '.join(DTYPES)} and 'auto'")


def _device(value: torch.device | str | None) -> torch.device:
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    here = ["cpu", *(f"cuda:{index}" for index in range(cuda)), *(["mps"] if mps else [])]
    if value is None:
        return torch.device("cuda" if cuda else "cpu")
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device {value!r}: this machine has {', '.join(here)}") from error
    there = {"cpu": 1, "cuda": cuda, "mps": int(mps)}.get(device.type, 0)
    if (device.index or 0) >= there:
        raise ValueError(f"device {str(value)!r}: this machine has {', '.join(here)}")
    return device


def _check_config(folder: Path) -> None:
    """Refuse, before any weights are read, what is no decoder language model of transformers' own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _read_json(folder / "config.json", "a model is a folder with config.json, tokenizer and *.safetensors")
    kind, architectures = config.get("model_type"), config.get("architectures") or []
    if kind not in CONFIG_MAPPING_NAMES:
        remote = ", and kvlab does not run code that comes with a model" if "auto_map" in config else ""
        raise UnsupportedModel(f"{folder}: model_type {kind!r} is not one that this transformers knows{remote}")
    if not set(architectures) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise UnsupportedModel(
            f"{folder}: looked for a decoder language model (such as LlamaForCausalLM) under 'architectures' in config.json "
            f"and found {', '.join(architectures) or 'none'}. Encoders and models without a language head are not for kvlab."
        )


def _check_weights(folder: Path) -> None:
    """Every weight file is there and as long as its own header says (reads kilobytes, not the weights)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index, "").get("weight_map")
        if not isinstance(shards, dict):
            raise DamagedModel(f"{index} is damaged: it has no weight_map. Copy or fetch it again.")
        files = [folder / name for name in sorted(set(shards.values()))]
    else:
        files = [folder / "model.safetensors"]
    for path in files:
        if not path.is_file():
            others = sorted(other.name for other in folder.iterdir() if other.suffix in {".bin", ".pt", ".pth", ".gguf"})
            seen = f" ({', '.join(others)} there; kvlab reads safetensors only)" if others else ""
            raise ModelUnavailable(f"{path} is missing{seen}")
        safetensors_header(path)


def _read_model(folder: Path, dtype: torch.dtype | str) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise DamagedModel(f"the weights in {folder} are damaged: {error}. Copy or fetch them again.") from error
    except RuntimeError as error:  # transformers: shapes that do not fit the configuration
        raise DamagedModel(f"the weights in {folder} do not fit its config.json: {_short(error)}") from error
    model, report = loaded
    if absent := sorted(report["missing_keys"]):
        raise DamagedModel(f"{folder} lacks {len(absent)} of the model's weights: {_few(absent)}. Copy or fetch it again.")
    return model.eval().requires_grad_(False)


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, padding_side="left")
    except Exception as error:  # transformers raises OSError, ValueError, TypeError, ImportError or a bare Exception here
        raise ModelUnavailable(f"{folder} has no tokenizer that can be read: {_short(error)}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer  # type: ignore[no-any-return]


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelUnavailable(f"{path} is missing: {hint}") from error
    except ValueError as error:
        raise DamagedModel(f"{path} is damaged: {error}. Copy or fetch it again.") from error
    if not isinstance(value, dict):
        raise DamagedModel(f"{path} is damaged: a JSON object was expected. Copy or fetch it again.")
    return value


def _few(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _short(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
