"""Which of transformers' causal language models kvlab serves: a tiny random model of every kind, run through both caches.

``python tools/families.py`` writes ``data/families.csv`` and the table in README.md (between its two marks); with names behind it, only these kinds anew. Each kind runs in a process of its own,
so that one that crashes or hangs is a row, too.
"""

from __future__ import annotations

import contextlib
import csv
import io
import multiprocessing
import os
import re
import resource
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TABLE, README = ROOT / "data" / "families.csv", ROOT / "README.md"
MARKS = ("<!-- families -->\n", "<!-- /families -->\n")
SECONDS, GIGABYTES = 300, 8

SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embedding_size": 64, "dim": 64, "word_embed_proj_dim": 64,
    "num_hidden_layers": 4, "num_layers": 4, "n_layer": 4, "n_layers": 4, "decoder_layers": 4, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "ffn_dim": 96, "n_inner": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size_mlp": 96, "expert_hidden_size": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_layer_start_index": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_head_dim": 32,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "kv_channels": 16, "rotary_dim": 8, "attention_chunk_size": 12,
    "max_position_embeddings": 512, "n_positions": 512, "max_sequence_length": 512, "sliding_window": 12, "window_size": 12,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "laurel_rank": 4,
    "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "state_size": 8, "time_step_rank": 8,
    "mamba_headdim": 32, "n_mamba_heads": 4, "mamba_num_heads": 4, "mamba_head_dim": 32, "conv_L_cache": 3, "num_memory_blocks": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "activation_dropout": 0.0, "is_decoder": True, "use_mrope": False,
}  # fmt: skip


#: What to leave out of SMALL and what to add, until one works.
VARIANTS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    ((), {}),
    ((), {"head_dim": 16}),
    ((), {"num_key_value_heads": 4}),
    (("head_dim",), {}),
    (("head_dim",), {"num_key_value_heads": 4}),
    (("num_key_value_heads", "head_dim"), {}),
    (("sliding_window", "window_size"), {}),
    ((), {"num_experts_per_tok": 1, "head_dim": 16}),
    ((), {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
    (("num_hidden_layers", "num_layers"), {}),
)


def tiny(kind: str) -> Any:
    """A small model of this type with random weights that runs on three tokens with transformers' own cache.

    Raises what the first attempt met if making every known size small leads to no such model.
    """
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from kvlab.cache import forward

    text = CONFIG_MAPPING[kind]().get_text_config(decoder=True)
    small = {}
    for name, value in SMALL.items():
        with contextlib.suppress(Exception):  # some sizes differ by layer and refuse to be read as one
            if getattr(text, name, None) is not None:
                small[name] = value
    first: Exception | None = None
    for drop, more in VARIANTS:
        changes = {name: value for name, value in small.items() if name not in drop} | more
        try:
            torch.manual_seed(0)
            config = type(text)(**changes)
            model = AutoModelForCausalLM.from_config(config).eval()
            forward(model, torch.tensor([[1, 2, 1]]), DynamicCache(config=config))
            return model
        except Exception as error:
            first = first or error
    raise first or ValueError("no configuration")


def judge(kind: str) -> tuple[str, str, str]:
    """model class, "works" or "refused" or "not tried", and why."""
    import torch

    sys.path.insert(0, str(ROOT))
    from kvlab import Strategy
    from kvlab.errors import UnsupportedModel
    from kvlab.lab import probe
    from tests.reference import ours, plain

    try:
        model = tiny(kind)
    except Exception as error:
        return without_a_model(kind, short(error))
    name = type(model).__name__
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    padding = torch.ones_like(ids)
    padding[0, :7] = 0
    try:
        probe(model)
    except UnsupportedModel as error:
        return name, "refused", reason(str(error))
    except Exception as error:
        return name, "FAILED", short(error)
    gaps = []
    for cuts, pads in (([40], None), ([16, 17, 18, 40], None), ([16, 17, 40], padding)):
        try:
            want = plain(model, ids, cuts, pads)
        except Exception as error:
            return name, "not tried", f"it fails in pieces by itself: {short(error)}"
        got, _ = ours(model, Strategy(), ids, cuts, pads)
        gaps.append(float((got - want).abs().max()) / max(1.0, float(want.abs().max())))
    if max(gaps) < 5e-5:  # float32 noise of the model itself; a fault shows as 1e-2 and more
        return name, "works", ""
    return name, "WRONG", f"gaps {', '.join(f'{gap:.1g}' for gap in gaps)}"


def without_a_model(kind: str, why: str) -> tuple[str, str, str]:
    """What the configuration alone tells: layers that keep a state are refused whatever the weights."""
    from types import SimpleNamespace

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from kvlab.cache import layer_plan
    from kvlab.errors import UnsupportedModel

    try:
        layer_plan(SimpleNamespace(config=CONFIG_MAPPING[kind]()))  # type: ignore[arg-type]
    except UnsupportedModel as error:
        return "", "refused", reason(str(error))
    except Exception:
        pass
    return "", "not tried", why


def short(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error) or type(error).__name__)[:160]


REASONS = {
    r"takes? (an|no) attention function|does not take an attention function": "takes no attention function from outside",
    r"keep more than keys and values \((\w+)\)": r"layers that keep a state (\1)",
    r"attention uses (.+?) between the cache and attention": r"uses \1 between cache and attention",
    r"brings a mask of its own": "brings a mask of its own",
    r"adds a position bias": "adds a position bias to its scores",
    r"is no decoder-only": "no decoder-only language model",
    r"does not use the cache": "does not use the cache it is given",
    r"gives other logits": "gives other logits than with transformers' own cache",
    r"updated twice without attention": "writes keys and values that its attention does not read through the interface",
    r"was read more often": "reads keys and values more than once",
    r"uses its keys and values in a way": "does arithmetic on keys or values between cache and attention",
}


def reason(message: str) -> str:
    for pattern, said in REASONS.items():
        if found := re.search(pattern, message):
            return found.expand(said) if "\\" in said else said
    return message[:160]


def _child(kind: str, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
    warnings.filterwarnings("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            answer = judge(kind)
        except BaseException as error:
            answer = ("", "FAILED", short(error))
    pipe.send(answer)
    pipe.close()
    os._exit(0)


def run(kind: str) -> dict[str, str]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(kind, theirs))
    process.start()
    theirs.close()
    answer = ("", "not tried", f"no answer in {SECONDS} s")
    if ours.poll(SECONDS):
        with contextlib.suppress(EOFError):
            answer = ours.recv()
    process.kill()
    process.join()
    return dict(zip(("model_type", "model", "result", "why"), (kind, *answer), strict=True))


def table(rows: list[dict[str, str]], version: str) -> str:
    """The README's part: what works by name, the rest by reason."""
    works = [row["model"].removesuffix("ForCausalLM").removesuffix("LMHeadModel") for row in rows if row["result"] == "works"]
    lines = [
        f"Of transformers {version}'s {len(rows)} kinds of causal language models, each as a tiny random model run against transformers' own cache (whole, in pieces,",
        "with left padding; `python tools/families.py`, [data/families.csv](data/families.csv)):",
        "",
        f"- **Exact ({len(works)}):** {', '.join(sorted(set(works), key=str.lower))}.",
    ]
    for result, title in (("refused", "Refused by name when loaded"), ("not tried", "Not tried")):
        some = [row for row in rows if row["result"] == result]
        if result == "refused":
            lines.append(f"- **{title} ({len(some)}):**")
            for why, count in Counter(row["why"] for row in some).most_common():
                names = sorted(row["model_type"] for row in some if row["why"] == why)
                lines.append(f"  - {why} ({count}): {', '.join(names)}.")
        elif some:
            lines.append(
                f"- **{title} ({len(some)}):** no small model of the kind could be made or run by the tool: {', '.join(sorted(r['model_type'] for r in some))}."
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import transformers
    from tqdm import tqdm
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    torch.set_num_threads(1)
    kinds = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        rows = list(tqdm(pool.map(run, kinds), total=len(kinds)))
    for row in rows:
        if row["result"] in ("WRONG", "FAILED") or sys.argv[1:]:
            print(*row.values(), sep=" | ")
    if sys.argv[1:]:  # a few kinds anew, the others as they were
        with TABLE.open(encoding="utf-8") as file:
            rows = sorted(
                {row["model_type"]: row for row in [*csv.DictReader(file), *rows]}.values(), key=lambda row: row["model_type"]
            )
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    README.write_text(before + MARKS[0] + table(rows, transformers.__version__) + MARKS[1] + after, encoding="utf-8")
    print(Counter(row["result"] for row in rows))


if __name__ == "__main__":
    main()
