"""Check and time the kernels on a GPU: ``python kernels/gpu.py --out FILE.json [--quick] [--budget SECONDS]``.

Needs torch, triton and a CUDA device; no network, no notebook, no installation. In four steps:

1. Every kernel against float64 (``gpu_cases.py``), in several processes at once (compiling is what takes the time), memory poisoned, each case three
   times, which must give the same bits. A case that fails, even one that takes its process down, is recorded with its traceback, and the rest go on.
2. Evidence while a prompt is read, against FlashAttention; pages, keys from before RoPE and other formats at one point (``gpu_times.py``).
3. A search over launch settings at 32K tokens, batch 8, Llama-3.1-8B heads.
4. The benchmark: dense, int8, int4 and int2 caches against the best of torch's attention backends on dense bfloat16, and against
   dequantize-then-attend; bandwidth as a fraction of a device copy in the same run, and each kernel's place on the roofline.

The exit code is 1 if a case failed. What the budget leaves no time for is listed under "skipped".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from gpu_cases import cases, poison
from gpu_times import (
    KINDS,
    Clock,
    benchmark,
    candidates,
    copy_bandwidth,
    eager_overhead,
    inputs,
    marks,
    matrix_peak,
    prefill,
    roofline,
    search,
    variants,
)

from kvlab_kernels import launch
from kvlab_kernels.decode import decode_attention


def warm_ups(quick: bool) -> dict[str, Callable[[], dict]]:
    """One call for everything that will be timed, so that it is compiled by then."""
    found = {}
    for kind in KINDS:
        for candidate in candidates(kind, quick):
            found[f"warm {kind} {candidate}"] = lambda kind=kind, candidate=candidate: attend_once(kind, candidate)
    return found


def attend_once(kind: str, settings: launch.Settings) -> dict:
    q, k, v = inputs(kind, "Llama-3.1-8B", 8, 32768)
    decode_attention(q, k, v, scaling=0.1, settings=settings)
    torch.cuda.synchronize()
    return {}


def work(index: int, workers: int, skip: int, out: Path, deadline: float, quick: bool) -> None:
    """One worker: every ``workers``-th task, a line of JSON for each."""
    poison()
    tasks = list((cases() | warm_ups(quick)).items())[index::workers]
    for position, (name, run) in enumerate(tasks):
        if position < skip:
            continue
        row: dict = {"name": name}
        start = time.monotonic()
        fatal = False
        if time.time() > deadline:
            row["skipped"] = True
        else:
            torch.manual_seed(position)
            try:
                row |= run()
                torch.cuda.synchronize()
                row["ok"] = True
            except Exception as error:
                row |= {"ok": False, "traceback": traceback.format_exc()[-4000:]}
                fatal = "CUDA error" in str(error) or "illegal" in str(error)
        row["seconds"] = round(time.monotonic() - start, 2)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if fatal:  # the context is gone: go on in a new process
            os.execv(
                sys.executable,
                [sys.executable, __file__, "--worker", f"{index},{workers},{position + 1},{out},{deadline},{int(quick)}"],
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_workers(quick: bool, seconds: float) -> list[dict]:
    count = max(1, min(12, (os.cpu_count() or 2) - 2))
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{i}.jsonl") for i in range(count)]
        deadline = time.time() + seconds
        logs = [file.with_suffix(".log") for file in files]
        processes = []
        for i, (file, log) in enumerate(zip(files, logs)):
            command = [sys.executable, __file__, "--worker", f"{i},{count},0,{file},{deadline},{int(quick)}"]
            with log.open("w") as errors:
                processes.append(subprocess.Popen(command, stderr=errors))
        rows = []
        for i, (process, file, log) in enumerate(zip(processes, files, logs)):
            try:
                process.wait(timeout=max(1.0, deadline + 20 - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if file.exists():
                rows += [json.loads(line) for line in file.read_text().splitlines()]
            if process.returncode:
                rows.append(
                    {
                        "name": f"worker {i}",
                        "ok": False,
                        "traceback": f"exit code {process.returncode}\n{log.read_text()[-4000:]}",
                    }
                )
    return rows


def table(report: dict) -> str:
    lines = [
        f"{'model':14} {'batch':>5} {'context':>7} {'best sdpa':>22} "
        + " ".join(f"{kind + ' ms (of copy, x sdpa)':>27}" for kind in KINDS)
    ]
    points = dict.fromkeys((r["model"], r["batch"], r["context"]) for r in report["benchmark"])
    for point in points:
        rows = {r["name"]: r for r in report["benchmark"] if (r["model"], r["batch"], r["context"]) == point and "ms" in r}
        dense = min((r for name, r in rows.items() if name.startswith("sdpa")), key=lambda r: r["ms"], default=None)
        cells = [f"{dense['name'][5:] + format(dense['ms'], ' 9.4f') if dense else 'none':>22}"]
        for kind in KINDS:
            r = rows.get(kind)
            cells.append(
                f"{r['ms']:10.4f} ({r['of_copy']:5.1%}, {dense['ms'] / r['ms'] if dense else 0:5.2f}x)".rjust(27)
                if r
                else "-".rjust(27)
            )
        lines.append(f"{point[0]:14} {point[1]:5} {point[2]:7} " + " ".join(cells))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer settings and points")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        index, workers, skip, out, deadline, quick = options.worker.split(",")
        work(int(index), int(workers), int(skip), Path(out), float(deadline), quick == "1")
        return 0
    if options.out is None:
        parser.error("--out is required")
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    import triton

    clock = Clock(options.budget)
    properties = torch.cuda.get_device_properties(0)
    report: dict = {
        "device": properties.name, "capability": f"{properties.major}.{properties.minor}", "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__, "triton": triton.__version__, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv[1:]),
        "cases": [], "search": [], "benchmark": [], "prefill": [], "variants": [],
    }  # fmt: skip

    def save() -> None:
        report["skipped"] = clock.skipped
        report["seconds"] = round(options.budget - clock.left(), 1)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1))

    rows = run_workers(options.quick, options.budget * 0.45)
    report["warm_up_failed"] = [r for r in rows if r["name"].startswith("warm") and not r.get("ok") and not r.get("skipped")]
    report["cases"] = [r for r in rows if not r["name"].startswith("warm")]
    clock.skipped += [r["name"] for r in rows if r.get("skipped")]
    failed = [r for r in report["cases"] if not r.get("ok") and not r.get("skipped")]
    print(
        f"{sum(bool(r.get('ok')) for r in report['cases'])} cases right, {len(failed)} wrong, after {options.budget - clock.left():.0f} s",
        flush=True,
    )
    for row in failed:
        print(f"WRONG {row['name']}: {row['traceback'].strip().splitlines()[-1][:200]}", flush=True)
    save()
    best: dict[str, launch.Settings] = {}
    steps: list[tuple[str, Callable[[], object]]] = [
        ("copy", lambda: report.update(copy_bytes_per_second=copy_bandwidth(), matrix_flops_per_second=matrix_peak())),
        ("eager", lambda: eager_overhead(report)),
        ("prefill", lambda: prefill(report, clock)),
        ("variants", lambda: variants(report, clock)),
        ("search", lambda: best.update(search(report, clock, options.quick))),
        ("benchmark", lambda: benchmark(report, clock, best, options.quick)),
        (
            "roofline",
            lambda: roofline(
                report["benchmark"] + report["variants"], report["copy_bytes_per_second"], report["matrix_flops_per_second"]
            ),
        ),
        ("marks", lambda: report.update(marks=marks(report))),
    ]
    for name, step in steps:
        try:
            step()
        except Exception:
            report[f"{name}_traceback"] = traceback.format_exc()
            print(f"{name} stopped: {traceback.format_exc().strip().splitlines()[-1]}", flush=True)
        save()
    report["best"] = {kind: asdict(settings) for kind, settings in best.items()}
    save()
    print(
        f"{report['device']}, copy {report.get('copy_bytes_per_second', 0) / 1e9:.0f} GB/s, eager {report.get('eager_microseconds', 0):.0f} us a call"
    )
    print(table(report))
    for row in report["prefill"]:
        print(
            f"prefill {row['tokens']}: {row['ms']:.2f} ms, {row['times_flash']:.2f} x FlashAttention, {row['extra_bytes']:,} bytes beside inputs and output"
        )
    for row in report["variants"]:
        print(f"{row['name']:40} " + (f"{row['ms']:.4f} ms, {row['of_copy']:.1%} of copy" if "ms" in row else row["failed"]))
    if clock.skipped:
        print(f"skipped for lack of time: {len(clock.skipped)}, the first: {clock.skipped[0]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
