"""Hand over: an engine's settings as those of the servers that people run. Beyond one machine kvlab does not serve.

print(hand_over(engine, "vllm"))
"""

from __future__ import annotations

import dataclasses

from kvlab.export import ENGINES, Exported, export
from kvlab.serving.engine import Engine

TO = ("vllm", "sglang")
VLLM_BLOCKS = (1, 8, 16, 32, 64, 128, 256)


def hand_over(engine: Engine, to: str) -> Exported:
    """``engine`` as flags of vLLM or SGLang: its strategy's as :func:`kvlab.export.export` has them, and its blocks, prefixes and batches. What they cannot do
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
    return dataclasses.replace(made, text=shape(settings), settings=settings, missing=tuple(missing), notes=tuple(notes))
