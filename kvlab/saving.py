"""Put a cache away in a file and go on with it later, in another process too: every bit as it was."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvlab.buffer import Buffer

if TYPE_CHECKING:
    from kvlab.cache import KVCache
    from kvlab.layer import Layer

VERSION = 3
_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "_attn_implementation",
    "attn_implementation",
}


def collect(cache: KVCache) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Everything that a cache holds, as header and tensors on the CPU. Raises ``RuntimeError`` for a cache that is parked or has failed half-way."""
    cache.check_whole()
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any] | None] = []
    for number, layer in enumerate(cache.layers):
        if not layer.is_initialized:
            layers.append(None)
            continue
        with layer.at_hand():
            rows = []
            for i, buffer in enumerate(layer.buffers()):
                rows.append(len(buffer))
                if len(buffer):
                    tensors[f"{number}.{i}"] = buffer.view().detach().cpu().contiguous()
        if layer.store.padding is not None:
            tensors[f"{number}.padding"] = layer.store.padding.to(torch.uint8).cpu()
        shape = layer.shape
        layers.append(
            {
                "seen": layer.seen, "evicted": layer.evicted, "dropped": layer.dropped, "rows": rows, "counts": layer.store.counts(), "batch": shape.batch,
                "kv_heads": shape.kv_heads, "key_dim": shape.key_dim, "value_dim": shape.value_dim, "dtype": str(shape.dtype).removeprefix("torch."),
            }
        )  # fmt: skip
    header = {
        "version": VERSION,
        "strategy": cache.strategy.to_dict(),
        "model": fingerprint(cache.model),
        "read": cache.read,
        "spans": cache.spans,
        "spoken_for": cache._spoken_for,
        "high_water": cache.high_water,
        "layers": layers,
    }
    return header, tensors


def save(cache: KVCache, path: str | os.PathLike[str]) -> Path:
    """Write a cache to ``path`` (safetensors; the strategy, the model's fingerprint, a checksum and the high-water mark stand in the header).

    The file appears whole or not at all. Nothing is changed in the cache. Raises ``OSError`` where it cannot be written or something else than a file
    is there, ``RuntimeError`` for a cache that is parked already or whose last step failed half-way, ``ValueError`` for what is no cache or no path.
    """
    if not hasattr(cache, "check_whole"):
        raise ValueError(f"save: {type(cache).__name__} is no kvlab.KVCache")
    path = file_path(path, "save")
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no ordinary file, and saving would replace it (allowed: a new name, or a file)")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder {path.absolute().parent}")
    header, tensors = collect(cache)
    header["digest"] = _digest(tensors)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, {"kvlab": json.dumps(header)})
        os.replace(part, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def read(model: nn.Module, path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file that :func:`save` wrote, once they are known to be whole and of this model; raises as ``kvlab.resume``."""
    path = file_path(path, "resume")
    if not hasattr(model, "config"):
        raise ValueError(f"resume: model={type(model).__name__} is no transformers model (it needs a config)")
    if not path.is_file():
        raise FileNotFoundError(f"no saved cache {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("kvlab", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, struct.error) as error:
        raise ValueError(f"{path} is damaged or no saved cache: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no saved cache (its header says nothing of kvlab)")
    if header.get("version") != VERSION:
        raise ValueError(f"{path} was written by version {header.get('version')} of this format (allowed: {VERSION})")
    if header["model"] != fingerprint(model):
        raise ValueError(f"{path} belongs to another model than this {type(model).__name__}: configuration or weights differ")
    if header["digest"] != _digest(tensors):
        raise ValueError(f"{path} is damaged: its numbers are not those that were saved")
    return header, tensors


def restore(cache: KVCache, header: dict[str, Any], tensors: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Give a new cache what :func:`read` gave; raises ``ValueError`` where the parts are not those of its strategy."""
    path = Path(path)
    if len(header["layers"]) != len(cache.layers):
        raise ValueError(f"{path} has {len(header['layers'])} layers, the model {len(cache.layers)}")
    cache.read = list(header["read"])
    cache.spans, cache._spoken_for = [(int(start), str(role)) for start, role in header["spans"]], int(header["spoken_for"])
    for number, (layer, about) in enumerate(zip(cache.layers, header["layers"], strict=True)):
        if about is not None:
            _restore(
                layer,
                about,
                {i: tensors.get(f"{number}.{i}") for i in range(len(about["rows"]))},
                tensors.get(f"{number}.padding"),
                path,
            )
            cache.put_away(number)
            cache.settle_bytes(layer)
    cache.high_water = max(cache.high_water, header["high_water"])


def file_path(path: Any, who: str) -> Path:
    """``path`` as a Path. Raises ``ValueError`` for what is none."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ValueError(f"{who}: path={path!r} is no file name (allowed: text or a path)")
    return Path(path)


def _digest(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().view(torch.uint8).reshape(-1).numpy().tobytes())
    return digest.hexdigest()


def _restore(layer: Layer, about: dict[str, Any], rows: dict[int, Tensor | None], padding: Tensor | None, path: Path) -> None:
    device, dtype = layer.cache.device, getattr(torch, about["dtype"])
    layer.prepare(about["batch"], about["kv_heads"], about["key_dim"], about["value_dim"], dtype, device)
    layer.seen, layer.evicted, layer.dropped = about["seen"], about["evicted"], about["dropped"]
    layer.store.padding = None if padding is None else padding.bool().to(device)
    buffers: list[Buffer] = layer.buffers()
    if len(buffers) != len(about["rows"]):
        raise ValueError(f"{path}: layer {layer.number} has {len(about['rows'])} parts, this version of the store {len(buffers)}")
    for i, (buffer, count) in enumerate(zip(buffers, about["rows"], strict=True)):
        tensor = rows[i]
        if count:
            if tensor is None or tensor.shape[2] != count:
                raise ValueError(f"{path} is damaged: part {i} of layer {layer.number} is missing or short")
            buffer.set(tensor.to(device))
    layer.store.recount(about["counts"])


def fingerprint(model: Any) -> str:
    """What tells one model from another: its configuration and a few numbers of every weight. A SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    config = {k: v for k, v in model.config.to_dict().items() if k not in _VOLATILE}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // 16)][:16].double().cpu()
        digest.update(name.encode() + some.numpy().tobytes())
    return digest.hexdigest()
