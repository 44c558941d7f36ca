"""A strategy as settings of the engines that people serve with, and a plain line wherever an engine has no equivalent.

    print(export(strategy, "vllm"))
    print(hand_over(kvlab.serving.Engine(lab), "vllm"))  # blocks, prefixes and batches, too

Each is pinned to the version whose documentation it was read from; a newer one may have more, or other names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvlab.strategy import Strategy

if TYPE_CHECKING:
    from kvlab.serving.engine import Engine as Serving

keep: Any = importlib.import_module("kvlab.keep")
store: Any = importlib.import_module("kvlab.store")
place: Any = importlib.import_module("kvlab.place")


@dataclass(frozen=True)
class Engine:
    """``version``: the one whose documentation, ``source``, was read. ``shape``: how settings are written down."""

    name: str
    version: str
    source: str
    shape: Callable[[dict[str, Any]], str]


@dataclass(frozen=True)
class Exported:
    """``settings``: by the engine's own names. ``missing``: what it cannot do, and what comes nearest. ``notes``: what differs although the names fit."""

    engine: str
    version: str
    source: str
    text: str
    settings: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether the engine can do all that the strategy asks for."""
        return not self.missing

    def __str__(self) -> str:
        lines = [f"# {self.engine} {self.version} ({self.source})", self.text]
        lines += [f"# note: {note}" for note in self.notes] + [f"# no equivalent: {missing}" for missing in self.missing]
        return "\n".join(line for line in lines if line)


def _flags(command: str) -> Callable[[dict[str, Any]], str]:
    return lambda settings: " ".join(
        [command, *(name if value is True else f"{name} {value}" for name, value in settings.items())]
    )


def _python(settings: dict[str, Any]) -> str:
    inside = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    return f"LLM(model=MODEL, kv_cache_config=KvCacheConfig({inside}))"


ENGINES = {
    "transformers": Engine(
        "transformers", "5.24.0", "https://huggingface.co/docs/transformers/kv_cache", lambda settings: settings.get("code", "")
    ),
    "vllm": Engine("vLLM", "0.16.0", "https://docs.vllm.ai/en/v0.16.0/api/vllm/config/cache/", _flags("vllm serve MODEL")),
    "sglang": Engine(
        "SGLang",
        "of August 2026",
        "https://docs.sglang.io/docs/advanced_features/server_arguments",
        _flags("python3 -m sglang.launch_server --model-path MODEL"),
    ),
    "tensorrt-llm": Engine(
        "TensorRT-LLM", "1.4.0rc4", "https://nvidia.github.io/TensorRT-LLM/1.4.0rc4/llm-api/reference/KvCacheConfig.html", _python
    ),
    "llama.cpp": Engine(
        "llama.cpp",
        "b10433",
        "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md",
        _flags("llama-server -m MODEL.gguf"),
    ),
}


class _Draft:
    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.missing: list[str] = []
        self.notes: list[str] = []


def export(strategy: Strategy, engine: str) -> Exported:
    """``strategy`` for one of :data:`ENGINES`. Raises ``ValueError`` for another name."""
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is not one of {', '.join(ENGINES)}")
    draft = _Draft()
    for part in (_stored, _kept, _placed):
        part(strategy, engine, draft)
    if strategy.chunk:
        _chunked(strategy.chunk, engine, draft)
    known = ENGINES[engine]
    if engine == "transformers":
        draft.settings["code"] = _transformers(strategy, draft)
    return Exported(
        known.name,
        known.version,
        known.source,
        known.shape(draft.settings),
        draft.settings,
        tuple(draft.missing),
        tuple(draft.notes),
    )


def _stored(strategy: Strategy, engine: str, draft: _Draft) -> None:
    how = strategy.store
    if isinstance(how, store.Dense):
        return
    if isinstance(how, store.Fp8):
        if engine == "llama.cpp":
            draft.missing.append(f"{how}: no 8-bit floats (nearest: --cache-type-k q8_0 --cache-type-v q8_0)")
        elif engine == "tensorrt-llm":
            draft.settings["dtype"] = "fp8"
            if how.format != "e4m3":
                draft.missing.append(f"{how}: e4m3 only")
        elif engine == "transformers":
            return
        else:
            draft.settings["--kv-cache-dtype"] = f"fp8_{how.format}"
            draft.notes.append("one scale for a layer, calibrated or 1.0; here every token of a head has its own")
        return
    if isinstance(how, store.Int) and engine == "llama.cpp" and how.bits in (8, 4):
        kind = {8: "q8_0", 4: "q4_0" if how.symmetric else "q4_1"}[how.bits]
        draft.settings |= {"--cache-type-k": kind, "--cache-type-v": kind, "--flash-attn": "on"}
        if how.key_axis == "channel":
            draft.notes.append(
                f"{kind} scales keys per token in blocks of 32 channels; here they are scaled per channel, which loses less at 4 bits"
            )
        if how.residual or how.sinks_exact:
            draft.missing.append(f"{how}: no tokens are left plain")
        return
    if engine == "transformers":
        return
    nearest = {
        "vllm": "--kv-cache-dtype fp8_e4m3",
        "sglang": "--kv-cache-dtype fp8_e4m3",
        "tensorrt-llm": 'dtype="fp8"',
        "llama.cpp": "--cache-type-k q4_1 --cache-type-v q4_1",
    }[engine]
    draft.missing.append(f"{how}: no such format (nearest: {nearest})")


def _kept(strategy: Strategy, engine: str, draft: _Draft) -> None:
    how = strategy.keep
    if isinstance(how, keep.Everything):
        return
    if isinstance(how, keep.Window):
        if engine == "tensorrt-llm":
            draft.settings["max_attention_window"] = [how.size + how.sinks]
            draft.settings["sink_token_length"] = how.sinks
            draft.settings["enable_block_reuse"] = False
            return
        if engine == "llama.cpp":
            draft.settings |= {"--ctx-size": how.size + how.sinks, "--keep": how.sinks, "--context-shift": True}
            draft.notes.append(
                "a full context loses half of what is not kept at once, and the rest is turned to new positions; here one token goes at a time"
            )
            return
    nearest = "" if isinstance(how, keep.Window) else "; a window with sinks is the nearest that TensorRT-LLM and llama.cpp have"
    draft.missing.append(f"{how}: no eviction inside a sequence{nearest}")


def _placed(strategy: Strategy, engine: str, draft: _Draft) -> None:
    how = strategy.place
    if isinstance(how, place.Resident):
        return
    disk = how.to == "disk"
    if engine == "vllm":
        draft.settings |= {"--kv-offloading-size": "GIB", "--kv-offloading-backend": "lmcache" if disk else "native"}
    elif engine == "sglang":
        draft.settings |= {"--enable-hierarchical-cache": True, "--hicache-ratio": 2}
        if disk:
            draft.settings["--hicache-storage-backend"] = "file"
    elif engine == "tensorrt-llm":
        draft.settings |= {"disk_cache_size": "BYTES", "disk_cache_path": "FOLDER"} if disk else {"host_cache_size": "BYTES"}
    elif engine == "llama.cpp":
        if disk:
            draft.missing.append(f"{how}: no disk under a running sequence (--slot-save-path saves whole conversations)")
        else:
            draft.settings["--no-kv-offload"] = True
            draft.notes.append("the cache lies in CPU RAM and attention runs on the CPU; nothing is brought back to the GPU")
        return
    else:
        return
    draft.missing.append(
        f"{how} of a sequence that is being decoded: it stays on the GPU (nearest: blocks of prompts that nobody decodes wait there, as set)"
    )


def _chunked(chunk: int, engine: str, draft: _Draft) -> None:
    if engine == "vllm":
        draft.settings |= {"--enable-chunked-prefill": True, "--max-num-batched-tokens": chunk}
    elif engine == "sglang":
        draft.settings["--chunked-prefill-size"] = chunk
    elif engine == "llama.cpp":
        draft.settings["--ubatch-size"] = chunk
    else:
        draft.notes.append(f"chunk={chunk}: set where the engine is built, not with the cache")


def _transformers(strategy: Strategy, draft: _Draft) -> str:
    """transformers' own caches; the nearest one, if it fits at all."""
    how, where = strategy.store, strategy.place
    if isinstance(how, store.Int) and how.bits in (8, 4, 3, 2) and isinstance(where, place.Resident):
        if how.key_axis == "channel":
            draft.notes.append("QuantizedCache with HQQ scales groups along the head dim; kvlab compare measures both")
        return (
            f'cache = QuantizedCache("hqq", model.config, nbits={how.bits}, q_group_size={how.group_size}, axis_key=1, axis_value=1, '
            "residual_length=128)\nmodel.generate(**inputs, cache=cache)"
        )
    if not isinstance(how, store.Dense):
        draft.missing.append(f"{how}: no such cache (nearest: QuantizedCache with HQQ at 4 bits)")
    if isinstance(where, place.Offload):
        if where.to == "disk":
            draft.missing.append(f"{where}: offloading goes to CPU RAM only")
        return "cache = DynamicCache(config=model.config, offloading=True)\nmodel.generate(**inputs, cache=cache)"
    return "cache = DynamicCache(config=model.config)\nmodel.generate(**inputs, cache=cache)"


TO = ("vllm", "sglang")
VLLM_BLOCKS = (1, 8, 16, 32, 64, 128, 256)
"""Tokens of a block that vLLM takes."""


def hand_over(engine: Serving, to: str) -> Exported:
    """``engine`` as flags of vLLM or SGLang: its strategy's as :func:`export` has them, and its blocks, prefixes and batches. What they cannot do
    is said. Raises ``ValueError`` for another name.
    """
    if to not in TO:
        raise ValueError(f"to={to!r} is not one of {', '.join(TO)}")
    made = export(engine.strategy, to)
    settings, missing, notes = dict(made.settings), list(made.missing), list(made.notes)
    size, blocks, scheduler = engine.pool.block_size, engine.pool.blocks, engine.scheduler
    if to == "vllm":
        if size in VLLM_BLOCKS:
            settings["--block-size"] = size
            if size > 32:
                notes.append("blocks of more than 32 tokens: not on every CUDA backend")
        else:
            nearest = min(VLLM_BLOCKS, key=lambda one: abs(one - size))
            missing.append(f"blocks of {size} tokens (nearest: --block-size {nearest})")
            settings["--block-size"], blocks = nearest, max(1, blocks * size // nearest)
        settings |= {
            "--num-gpu-blocks-override": blocks,
            "--max-num-batched-tokens": scheduler.token_budget,
            "--max-num-seqs": scheduler.max_running,
            "--enable-prefix-caching" if engine.tree is not None else "--no-enable-prefix-caching": True,
        }
        notes.append(
            "without --num-gpu-blocks-override it takes what --gpu-memory-utilization leaves, which is what a server should do"
        )
        if engine.tree is not None:
            notes.append("full blocks only are shared; a tenant's salt is the request's cache_salt")
            if engine.tree.policy == "lfu":
                missing.append("policy='lfu' (nearest: the block used longest ago goes first, which it always does)")
        if scheduler.preempt == "swap":
            missing.append("preempt='swap': whoever makes room is computed again")
    else:
        settings |= {
            "--page-size": size,
            "--max-total-tokens": blocks * size,
            "--chunked-prefill-size": scheduler.token_budget,
            "--max-running-requests": scheduler.max_running,
        }
        if engine.tree is None:
            settings["--disable-radix-cache"] = True
        elif engine.tree.policy == "lfu":
            settings["--radix-eviction-policy"] = "lfu"
        notes.append("without --max-total-tokens it takes what --mem-fraction-static leaves, which is what a server should do")
        if scheduler.preempt == "swap":
            missing.append("preempt='swap': whoever makes room is computed again")
    plain = next(engine.lab.model.parameters()).element_size()
    if plain != 2:
        notes.append(f"plain numbers have {8 * plain} bits here; a server's 16 bits take less for the same number of tokens")
    if scheduler.batching == "static":
        missing.append("batching='static': requests always join and leave at every step")
    if scheduler.reserve == "worst":
        missing.append("reserve='worst': blocks are taken as texts grow")
    shape = ENGINES[to].shape
    return replace(made, text=shape(settings), settings=settings, missing=tuple(missing), notes=tuple(notes))
