"""Studies of the place axis, whose rows lie in ``data/results/place.jsonl``: what prefetch hides, and what comes back when only the best pages do."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kvlab.cache import KVCache, forward
from kvlab.lab import Lab
from kvlab.measure.moving import fill, moved
from kvlab.measure.quality import REFERENCE, compared, control
from kvlab.measure.tasks import two_keys
from kvlab.place.disk import PIECE, read
from kvlab.strategy import Strategy
from kvlab.texts import reference_text

Row = dict[str, Any]
keep: Any = importlib.import_module("kvlab.keep")
store: Any = importlib.import_module("kvlab.store")
place: Any = importlib.import_module("kvlab.place")


def disk_rate(folder: Path) -> float:
    """Bytes a second at which ``dd`` reads the files of a folder one after the other, past the system's cache; our own loop where there is no ``dd``."""
    seconds, count = 0.0, 0
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        if size < 1 << 20:
            continue
        count += size
        if shutil.which("dd"):
            done = subprocess.run(
                ["dd", f"if={path}", "of=/dev/null", f"bs={PIECE}", "iflag=direct"],
                capture_output=True,
                text=True,
                check=True,
                env={"LC_ALL": "C", "PATH": "/usr/bin:/bin"},
            )
            found = re.search(r"copied, ([0-9.e+-]+) s", done.stderr)
            assert found, done.stderr
            seconds += float(found[1])
        else:
            began = time.perf_counter()
            for offset in range(0, size, PIECE):
                read(path, offset, min(PIECE, size - offset), True)
            seconds += time.perf_counter() - began
    return count / seconds if seconds else float("nan")


def copy_rate(device: torch.device, pinned: bool, size: int = 256 << 20) -> float:
    """Bytes a second that one copy from CPU RAM to a GPU reaches, the median of five."""
    source, target = torch.empty(size, dtype=torch.uint8, pin_memory=pinned), torch.empty(size, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(size / (time.perf_counter() - began))
    return statistics.median(rates[1:])


def overlap_gpu(lab: Lab, say: Callable[[str], None], tokens: int = 8192, steps: int = 6) -> Iterator[Row]:
    """Decode steps over a cache in CPU RAM beside a GPU, pinned and not, with 0, 1 and 2 layers fetched ahead; and what one large copy reaches."""
    content = _random_layers(lab, tokens)
    resident = moved(lab, Strategy(), content, steps=steps).step
    for pinned in (True, False):
        rate = copy_rate(lab.device, pinned)
        for ahead in (0, 1, 2):
            run = moved(lab, Strategy(place=place.Offload(to="cpu", prefetch=ahead, pin=pinned)), content, steps=steps)
            line = run.line
            row: Row = {
                "name": f"{'pinned' if pinned else 'pageable'}, {ahead} ahead",
                "strategy": run.strategy.to_code(),
                "tokens": run.tokens,
                "step": run.step,
                "resident_step": resident,
                "bytes": run.bytes,
                "stall": line.seconds("stall") / steps,
                "compute": line.seconds("compute") / steps,
                "hidden": line.hidden,
                "hideable": line.hideable,
                "bandwidth": line.bandwidth,
                "copy": rate,
                "high_water": run.high_water,
                "layer": run.layer,
            }
            say(
                f"{row['name']:20} {1e3 * run.step:7.2f} ms a step (resident {1e3 * resident:.2f})  hidden {100 * line.hidden:5.1f}% of "
                f"{100 * line.hideable:.1f}%  {line.bandwidth / 1e9:.1f} GB/s, {100 * line.bandwidth / rate:.0f}% of one large copy"
            )
            yield row


def _random_layers(lab: Lab, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    shape, dtype = lab.geometry.layers[0], lab.model.dtype
    made = torch.Generator().manual_seed(0)
    sides = [torch.randn(1, shape.kv_heads, tokens, dim, generator=made) for dim in (shape.key_dim, shape.value_dim)]
    return [(sides[0].to(lab.device, dtype), sides[1].to(lab.device, dtype))] * len(lab.geometry.layers)


def overlap(lab: Lab, say: Callable[[str], None], steps: int = 6, rounds: int = 3) -> Iterator[Row]:
    """Decode steps over a cache on disk, read past the system's cache, with 0, 1 and 2 layers fetched ahead, in turn; the context is so long that a layer's
    fetch takes about as long as its computing. ``dd`` reads the same files between the runs. Then the same over an emulated link of just that speed.
    """
    if lab.device.type == "cuda":
        yield from overlap_gpu(lab, say)
        return
    shape = lab.geometry.layers[0]
    row = shape.kv_heads * (shape.key_dim + shape.value_dim) * torch.finfo(lab.model.dtype).bits // 8
    count = len(lab.geometry.layers)

    def folder(cache: KVCache) -> Path:
        return Path(cache.place.tier.folder)  # type: ignore[attr-defined]

    probe = KVCache(lab.model, Strategy(place=place.Offload(to="disk", direct=True)))
    fill(probe, _random_layers(lab, 2048))
    rate = statistics.median(disk_rate(folder(probe)) for _ in range(5))
    probe.close()
    computing = moved(lab, Strategy(), _random_layers(lab, 2048), steps=8).step / count
    tokens = max(512, min(6000, int(computing * rate / row) // 16 * 16))
    content = _random_layers(lab, tokens)
    resident = moved(lab, Strategy(), content, steps=8).step
    speed = round(tokens * row / (resident / count) / 1e9, 3)
    for link in (0.0, speed):
        runs: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        rates: list[float] = []
        for _ in range(rounds):
            for ahead in runs:
                where = place.Offload(to="disk", direct=not link, prefetch=ahead, emulate=link)
                runs[ahead].append(moved(lab, Strategy(place=where), content, steps=steps))
            if not link:
                same = KVCache(lab.model, Strategy(place=place.Offload(to="disk", direct=True)))
                fill(same, content)
                rates.append(disk_rate(folder(same)))
                same.close()
        for ahead, made in runs.items():
            run = sorted(made, key=lambda one: one.step)[len(made) // 2]
            line = run.line
            out: Row = {
                "name": f"{'emulated link' if link else 'disk'}, {ahead} ahead",
                "strategy": run.strategy.to_code(),
                "tokens": run.tokens,
                "emulated": link,
                "step": run.step,
                "resident_step": resident,
                "bytes": run.bytes,
                "fetch": statistics.median(one.line.seconds("fetch") / steps for one in made),
                "stall": line.seconds("stall") / steps,
                "compute": line.seconds("compute") / steps,
                "hidden": line.hidden,
                "hideable": line.hideable,
                "bandwidth": line.bandwidth,
                "bandwidths": [one.line.bandwidth for one in made],
                "dd": statistics.median(rates) if rates else None,
                "dds": rates,
                "high_water": run.high_water,
                "layer": run.layer,
                "spans": [
                    [s.kind, s.layer, s.step, round(s.start, 6), round(s.stop, 6), s.bytes] for s in line.steps(1, 1).spans
                ],
            }
            say(
                f"{out['name']:24} {1e3 * run.step:7.1f} ms a step (resident {1e3 * resident:.1f})  hidden {100 * line.hidden:5.1f}% of "
                f"{100 * line.hideable:.1f}% that could be  {line.bandwidth / 1e9:.2f} GB/s"
                + (f" (dd {out['dd'] / 1e9:.2f})" if rates else "")
                + f"  most on the device {run.high_water / run.layer:.2f} layers"
            )
            yield out


def selective(lab: Lab, say: Callable[[str], None], only: str = "") -> Iterator[Row]:
    """The reference protocol one token at a time, and two pass keys in a text, with a quarter of the pages read, from disk: quality, and bytes moved, as a
    share of those that were away. ``only``: the ways whose names contain it."""
    prefill, scored, _ = REFERENCE
    ids = lab.encode(reference_text()[: 8 * (prefill + scored)])[:, : prefill + scored]
    against = control(lab, ids, step=1)
    half = "float16"
    ways = {
        "everything from disk": Strategy(place=place.Offload(to="disk")),
        "a quarter of the pages": Strategy(keep=keep.Quest(budget=0.25), place=place.Offload(to="disk")),
        "a quarter of the pages, 4 tokens each": Strategy(keep=keep.Quest(budget=0.25, page=4), place=place.Offload(to="disk")),
        "a quarter of the pages, 4 tokens each, one layer read whole, not two": Strategy(
            keep=keep.Quest(budget=0.25, page=4, dense=1), place=place.Offload(to="disk")
        ),
        "a quarter of the pages, 8 bits": Strategy(
            keep=keep.Quest(budget=0.25), store=store.Int(bits=8, key_axis="token", plain=half), place=place.Offload(to="disk")
        ),
        "an eighth of the pages": Strategy(keep=keep.Quest(budget=0.125), place=place.Offload(to="disk")),
    }
    recall = two_keys(lab, Strategy(), seed=11)
    for name, strategy in ways.items():
        if only not in name:
            continue
        cache = KVCache(lab.model, strategy)
        rows = [lab.prefill(ids[:, :prefill], cache, 0)[0, -1:].float()]
        line = cache.timeline()
        away = 0
        for start in range(prefill, ids.shape[1]):
            away += sum(buffer.away * buffer.row_bytes for layer in cache.layers for buffer in layer.buffers())
            rows.append(forward(lab.model, ids[:, start : start + 1], cache)[0].float())
        line.stop()
        loss, full, kl, agree = compared(torch.cat(rows)[:-1].clone(), against)
        count = line.bytes("fetch")
        keys = recall if not strategy.keep.looks else two_keys(lab, strategy, seed=11)
        row: Row = {
            "name": name,
            "strategy": strategy.to_code(),
            "perplexity_change": float((loss - full).double().mean().exp()) - 1,
            "kl": float(kl.double().mean()),
            "agreement": float(agree.double().mean()),
            "bytes": count / scored,
            "share": count / away,
            "found": keys.found,
            "asked": keys.asked,
            "full_found": recall.found,
            "ratio": cache.memory().ratio,
        }
        cache.close()
        say(
            f"{name:40} moved {row['bytes'] / 1e6:6.2f} MB a token ({100 * row['share']:.1f}%)  KL {row['kl']:.4f}  perplexity "
            f"{100 * row['perplexity_change']:+.2f}%  keys {keys.found} of {keys.asked} (full {recall.found})"
        )
        yield row


def main(out: str) -> None:
    """On a GPU, without the command line's packages: that offloading changes nothing, and the rows of :func:`overlap_gpu`, for random weights of
    Llama-3.1-8B's shape, 16 layers of it. A minute or so; writes ``out`` (JSON)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=4096,
        max_position_embeddings=131072, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    lab = Lab("Llama-3.1-8B's shape, 16 layers", model, None)
    ids = torch.randint(3, 4096, (1, 600), device="cuda")
    logits = []
    for strategy in (
        Strategy(),
        *(Strategy(place=place.Offload(to="cpu", prefetch=n, pin=p)) for n in (0, 1, 3) for p in (True, False)),
    ):
        cache = KVCache(model, strategy)
        cuts = [0, 400, *range(401, 601)]
        logits.append(torch.cat([forward(model, ids[:, a:b], cache, last=True) for a, b in itertools.pairwise(cuts)]).cpu())
        cache.close()
    exact = [bool(torch.equal(one, logits[0])) for one in logits[1:]]
    print("200 steps bit for bit as without offloading:", exact, flush=True)
    rows = [row for tokens in (8192, 65536) for row in overlap_gpu(lab, print, tokens)]
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "exact": exact, "rows": rows}
    Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
