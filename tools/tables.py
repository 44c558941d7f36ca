"""Write README's tables of recorded results from the rows in data/results.

Usage: python tools/tables.py [--check]      (--check: change nothing, exit 1 if README is out of date)
"""

import json
import re
import sys
from pathlib import Path

from kvlab.measure.claims import claims
from kvlab.measure.experiment import Evidence, recorded
from kvlab.measure.named import name_of, named
from kvlab.measure.studies import recorded as studied
from kvlab.plots.experiment import front

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "window + sinks", "window, no sinks", "H2O", "SnapKV", "TOVA", "PyramidKV", "KeyDiff", "Quest", "random", "int8", "int4", "int3, keys before RoPE",
    "KIVI, 2 bits", "fp8 e4m3", "low rank 48, keys only, 8 bits", "H2O, half + int4", "int4 on disk",
)  # fmt: skip
"""What the short table always has beside what nothing beats."""


def percent(value: float) -> str:
    return f"{100 * value:+.2f}%" if abs(value) < 0.01 else f"{100 * value:+.1f}%" if abs(value) < 1 else f"{100 * value:+,.0f}%"


def number(value: float) -> str:
    return "0" if value < 5e-7 else f"{value:.1g}" if value < 0.001 else f"{value:.2g}"


def recall(row: Evidence | None) -> str:
    if row is None or row.score is None:
        return "—"
    return f"{round(row.score * row.questions)} of {row.questions}"


def line(name: str, rows: dict[str, Evidence]) -> str:
    text = rows.get("Text")
    if text is None or text.score is None or text.ratio is None or text.bytes_high_water is None or text.bytes_allocated is None:
        why = next((row.why for row in rows.values() if row.why), "not measured")
        return f"| {name} | | | | | | {why.partition(': ')[2] or why} | |"
    most = text.bytes_high_water / (text.bytes_allocated / text.ratio)
    quality = f"{percent(text.more['perplexity_change'])} | {number(text.more['kl'])} | {100 * text.score:.1f}%"
    return f"| {name} | {100 * text.ratio:.1f}% | {100 * most:.0f}% | {quality} | {recall(rows.get('TwoKeys'))} | {recall(rows.get('Correction'))} |"


def evidence() -> str:
    by: dict[str, dict[str, Evidence]] = {}
    for row in recorded():
        by.setdefault(name_of(row.settings), {})[str(row.task["task"])] = row
    order = [name for name in named() if name in by]
    texts = [(name, by[name]["Text"]) for name in order if "Text" in by[name] and by[name]["Text"].score is not None]
    best = {texts[i][0] for i in front([(row.ratio or 0.0, -row.more["kl"]) for _, row in texts])}
    head = (
        "| strategy | of 16-bit | most on the device | perplexity | KL to full (nats) | same next token | pass keys | corrections |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    some = [
        line("**" + name + "**" if name in best else name, by[name])
        for name in order
        if name == "full cache" or name in best or name in SHOWN
    ]
    whole = [line(name, by[name]) for name in order]
    first = recorded()[0]
    about = (
        f"{len(recorded())} rows of {first.model} in {first.dtype} on {first.machine['cores']} cores, torch {first.machine['torch']}, transformers {first.machine['transformers']} "
        f"(`{first.command} --out data/results/evidence.jsonl`). The first 1,024 tokens of the reference text at once, the next 1,024 through the cache, 16 at a time; two pass keys in "
        '1,024 tokens, both asked for after the text was read; a fact corrected in 1,024 tokens. What evicts keeps 205 tokens a head, a fifth of those texts; "half" is 512. "Of 16-bit" is bytes '
        "allocated against a 16-bit dense cache: a float32 run of the full cache takes twice that, and so does every token in a plain tail. Bold: nothing takes fewer bytes at a smaller KL."
    )
    return "\n".join(
        [about, "", head, *some, "", f"<details><summary>All {len(order)}</summary>", "", head, *whole, "", "</details>"]
    )


def claimed() -> str:
    rows = [f"| {one.claim} ([source]({one.source}), {one.models}) | {one.strategy} | {one.measured} |" for one in claims()]
    return "\n".join(["| claimed | nearest here | measured on SmolLM2-135M |", "|---|---|---|", *rows])


def compared() -> str:
    newest = json.loads((ROOT / "data/results/compare.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    rows = []
    for row in newest["rows"]:
        name = row["name"] if row["name"].startswith(("Dynamic", "Static", "Quantized", "kvpress")) else name_or_code(row["name"])
        if row["kl"] is None:
            rows.append(f"| {name} | | | | | {row['why'].splitlines()[0][:80]} |")
        else:
            rows.append(
                f"| {name} | {row['effective_bits']:.2f} | {number(row['kl'])} | {100 * row['agreement']:.1f}% | {percent(row['perplexity_change'])} | {1e3 * row['step']:.0f} ms |"
            )
    return "\n".join(
        [
            "| cache | bits a number | KL to full (nats) | same next token | perplexity | step |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )


def name_or_code(text: str) -> str:
    return "**kvlab**, full cache" if text == "full cache" else f"**kvlab** `{text}`"


def served() -> str:
    batches, one = studied("batching"), {row["name"]: row for row in studied("batch8")}
    lines = [
        "| 40 chats, all there at the start, memory for 8 of 2,048 tokens | tokens a second | at once, on average | places empty |",
        "|---|---|---|---|",
    ]
    for row in batches:
        own = (f"{row['concurrent']:.1f}", f"{100 * row['waste']:.0f}%") if "waste" in row else ("", "")
        lines.append(f"| {row['name']} | {row['throughput']:.1f} | {own[0]} | {own[1]} |")
    lines += [
        "",
        "| 400 chats in the same memory, counted by the scheduler (16-bit numbers) | at once | places empty | had to make room |",
        "|---|---|---|---|",
    ]
    for row in studied("paging"):
        if "blocks of" not in row["name"]:
            lines.append(f"| {row['name']} | {row['concurrent']:.1f} | {100 * row['waste']:.1f}% | {row['preemptions']} |")
    prefix = {row["name"]: row for study in ("prefix", "shared") for row in studied(study)}
    shared, alone = prefix["one after the other, shared"], prefix["one after the other, not shared"]
    real, counted = prefix["all at once, shared"], prefix["all at once, not shared (counted)"]
    engine, made = studied("simulator")
    together, theirs = one["engine, together"], one["transformers' continuous batching"]
    computed = real["computed"] - real["made"] + real["served"]  # each answer's last token is never read
    lines += [
        "",
        f"Eight texts at once: {together['times']:.2f} times the tokens a second of `generate()` one by one{', the same tokens' if together['same_tokens'] else ''}; transformers' own continuous batching {theirs['times']:.2f} times. "
        f"A hundred requests with 2,000 tokens in common, 64 of their own: {100 * (1 - computed / real['prompt_tokens']):.1f}% fewer prompt tokens computed, "
        f"{real['prefix_blocks']:,} blocks for the common part instead of {counted['prefix_blocks']:,}; ten of them one after the other: "
        f"the first token of later ones after {shared['later']:.2f} s instead of {alone['later']:.2f} s ({alone['later'] / shared['later']:.0f} times sooner). "
        f"The simulator, its clock fitted to other requests on that machine: throughput {100 * (made['throughput'] / engine['throughput'] - 1):+.0f}%, KV usage {100 * (made['kv_usage'] / engine['kv_usage'] - 1):+.0f}% of the engine's.",
    ]
    return "\n".join(lines)


def panels() -> str:
    rows = [json.loads(line) for line in (ROOT / "data/results/panels.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [
        "| panel | notebook | first figure | all measured here | slider released, first figure changes | all measured again |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[name]:.1f} s" if name in row else "" for name in ("first", "done", "moved", "settled")]
        lines.append(f"| `{row['panel']}` | {row['notebook'][:2]} | {' | '.join(times)} |")
    return "\n".join(lines)


TABLES = {"panels": panels, "evidence": evidence, "claims": claimed, "compare": compared, "serving": served}


def written(readme: str) -> str:
    for name, make in TABLES.items():
        pattern = re.compile(f"<!-- {name} -->\n.*?\n<!-- /{name} -->", re.DOTALL)
        if not pattern.search(readme):
            raise SystemExit(f"README.md has no place for the table {name!r}: <!-- {name} --> ... <!-- /{name} -->")
        table = make()
        readme = pattern.sub(lambda _, name=name, table=table: f"<!-- {name} -->\n{table}\n<!-- /{name} -->", readme)
    return readme


def main() -> None:
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = written(before)
    if "--check" in sys.argv:
        sys.exit(0 if before == after else "README.md is out of date: python tools/tables.py")
    path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
