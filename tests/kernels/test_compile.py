"""The kernels compiled for real GPUs, without one: no spills, wide loads, tensor cores. ``KVLAB_COMPILE=all`` compiles every variant."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab_kernels

QUICK = {
    90: ["int4 g64", "bf16 sinks", "int4 pages of 64", "int4 mass"],
    80: ["int4 before RoPE"],
    100: ["e4m3"],
}
SCRIPT = """
import json, sys, torch
from dataclasses import asdict
from kvlab_kernels import aot
torch.set_num_threads(1)
names = set(sys.argv[2:])
rows = aot.report(int(sys.argv[1]), lambda job: not names or job.variant in names)
print(json.dumps([asdict(row) | {"wide": row.wide} for row in rows]))
"""


def compile_rows(arch, names):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(kvlab_kernels.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(arch), *names], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", QUICK)
def test_compiles_well(arch, capsys):
    everything = os.environ.get("KVLAB_COMPILE") == "all"
    rows = compile_rows(arch, [] if everything else QUICK[arch])
    assert rows
    with capsys.disabled():
        print()
        for row in rows:
            print(
                "  sm_{arch} {kernel:16} {variant:22} {registers:3} registers, {spills} spills, {shared:6} shared, loop {loop}".format(
                    **row
                )
            )
    for row in rows:
        name = f"{row['kernel']} {row['variant']} sm_{arch}"
        allowed = 0 if row["hot"] else 24  # float32 and unusual head dims may spill a little outside the inner products
        assert row["spills"] <= allowed, f"{name} spills in {row['spills']} instructions"
        assert row["shared"] <= 99 * 1024, f"{name} needs {row['shared']} bytes of shared memory"
        if row["hot"]:
            assert row["wide"], f"{name} reads the cache by narrow loads: {row}"
        if row["kernel"] == "decode_split":
            assert row["mma"] > 0, f"{name} has no matrix instructions"
