"""Other libraries' caches, as `kvlab compare` runs them: transformers' own, the quantized ones of HQQ and quanto, and kvpress's presses."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import Cache

FIFTH = 0.8  # of a prompt's tokens go: what the presses' own tables compare


@dataclass(frozen=True)
class Peer:
    """Another library's cache. ``make(config, room)``: a new one with room for so many tokens. ``needs``: what must be installed for it; ``gpu``: it needs one.
    ``around(model)``: what must be open while the model runs.
    """

    name: str
    make: Callable[[Any, int], Cache]
    needs: str = ""
    gpu: bool = False
    around: Callable[[nn.Module], AbstractContextManager[Any]] = contextlib.nullcontext

    @property
    def missing(self) -> str:
        """Why it cannot run here; "" if it can."""
        try:
            importlib.metadata.version(self.needs or "transformers")
        except importlib.metadata.PackageNotFoundError:
            return f"not installed: {self.needs}"
        return "needs a GPU, and there is none" if self.gpu and not torch.cuda.is_available() else ""


def _quantized(backend: str, bits: int, group: int) -> Callable[[Any, int], Cache]:
    axis = 0 if backend == "quanto" else 1
    return lambda config, room: QuantizedCache(
        backend, config, nbits=bits, q_group_size=group, axis_key=axis, axis_value=axis, residual_length=128
    )


def _sliding(window: int) -> Callable[[Any, int], Cache]:
    """transformers' own sliding layers, under a model that was not made for them."""

    def make(config: Any, room: int) -> Cache:
        own = copy.deepcopy(config.get_text_config(decoder=True))
        own.sliding_window, own.layer_types = window, ["sliding_attention"] * own.num_hidden_layers
        return DynamicCache(config=own)

    return make


class _Pressed(DynamicCache):
    """A DynamicCache whose tokens a press may take away: positions go on from what was seen, masks speak of what is left."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.seen: dict[int, int] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.seen[layer_idx] = self.seen.get(layer_idx, 0) + key_states.shape[2]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        return self.seen.get(layer_idx, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        seen = self.seen.get(layer_idx, 0)
        held = self.layers[layer_idx].get_seq_length() if seen else 0
        return held + query_length, seen - held


def _press(name: str, **settings: Any) -> Peer:
    """One of kvpress's presses, which compress a prompt once; later tokens are all kept.

    kvpress reads arguments of attention that transformers has since renamed; they are handed to it under their old names.
    """

    @contextlib.contextmanager
    def around(model: nn.Module) -> Iterator[None]:
        press = getattr(importlib.import_module("kvpress"), name)(compression_ratio=FIFTH, **settings)
        plain = press.forward_hook

        def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            cache: Any = kwargs.get("past_key_values", kwargs.get("cache"))
            seen, new = cache.seen[module.layer_idx], kwargs["hidden_states"].shape[1]
            old = {"past_key_values": cache, "cache_position": torch.arange(seen - new, seen)}
            return plain(module, args, kwargs | old, output)

        press.forward_hook = hook
        with press(model):
            yield

    return Peer(
        f"kvpress {name}, {FIFTH:.0%} of the prompt gone", lambda config, room: _Pressed(config), "kvpress", around=around
    )


#: Each at the settings its documentation gives, or better ones.
PEERS = (
    Peer("DynamicCache", lambda config, room: DynamicCache(config=config)),
    Peer("StaticCache", lambda config, room: StaticCache(config=config, max_cache_len=room)),
    Peer("DynamicCache, offloaded", lambda config, room: DynamicCache(config=config, offloading=True), gpu=True),
    Peer("DynamicCache, sliding layers of 256", _sliding(256)),
    *(Peer(f"QuantizedCache HQQ int{bits}", _quantized("hqq", bits, 64), "hqq") for bits in (8, 4, 3, 2)),
    *(Peer(f"QuantizedCache quanto int{bits}", _quantized("quanto", bits, 64), "optimum-quanto") for bits in (4, 2)),
    *(
        _press(name)
        for name in (
            "StreamingLLMPress", "SnapKVPress", "TOVAPress", "ExpectedAttentionPress", "KeyDiffPress", "KnormPress", "RandomPress",
        )
    ),
)  # fmt: skip
