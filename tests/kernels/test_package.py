"""The package as such: it imports without triton, and its launch table is sane."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kvlab_kernels import launch


def test_imports_without_triton():
    code = """
        import sys
        sys.modules["triton"] = None  # any import of it fails
        import torch
        import kvlab_kernels, kvlab_kernels.layout, kvlab_kernels.reference, kvlab_kernels.launch
        from kvlab_kernels.decode import decode_attention
        from kvlab_kernels.quantize import quantize
        kvlab_kernels.reference.quantize_torch(torch.zeros(1, 1, 4, 8), 4, "token", 8)
        for call in (lambda: quantize(torch.zeros(1, 1, 4, 8), 4, "token", 8), lambda: decode_attention(*[torch.zeros(1, 1, 1, 8)] * 3, scaling=1.0)):
            try:
                call()
            except RuntimeError as error:
                assert "needs triton, which is not installed" in str(error), error
            else:
                raise AssertionError("ran without triton")
    """
    path = str(Path(launch.__file__).parents[1])
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=os.environ | {"PYTHONPATH": path})


def test_refuses_a_cpu_without_the_interpreter(monkeypatch):
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        launch.check_device(torch.zeros(1))


def test_refuses_two_devices():
    with pytest.raises(ValueError, match="one device"):
        launch.check_device(torch.zeros(1), torch.zeros(1, device="meta"))


def test_splits_fill_the_device_and_no_more():
    hopper, settings = torch.device("meta", 90), launch.Settings(programs_per_sm=8)
    assert launch.splits(hopper, 64, 32768, settings) == 16  # 64 x 16 = 1,024 of the 1,056 programs that 132 processors hold
    assert launch.splits(hopper, 64, 100, settings) == 1  # too short to cut
    assert launch.splits(hopper, 8, 131072, settings) == 132
    assert launch.splits(hopper, 4096, 2048, settings) == 1


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("bits", [32, 16, 8, 4, 2])
def test_table_is_complete(arch, bits):
    for dim in (64, 80, 96, 128, 256):
        found = launch.settings(torch.device("meta", arch), bits, dim, 8)
        assert found.block_n * dim <= 8192 and found.block_n >= 16 and found.num_warps in (1, 2, 4, 8)


def test_tune_measures_once_and_remembers(tmp_path, monkeypatch):
    import triton.testing

    cost = {16: 3.0, 32: 1.0, 64: 2.0}
    runs = []

    def run(settings):
        runs.append(settings.block_n)
        if settings.block_n == 128:
            raise RuntimeError("too much shared memory")

    monkeypatch.setattr(triton.testing, "do_bench", lambda call, **_: (call(), cost[runs[-1]])[1])
    monkeypatch.setattr(launch, "_TUNED", {})
    candidates = [launch.Settings(block_n=n) for n in (16, 128, 32, 64)]
    file = tmp_path / "tuned" / "launch.json"
    assert launch.tune(("int8", 128), run, candidates, file).block_n == 32
    before = len(runs)
    assert launch.tune(("int8", 128), run, candidates, file).block_n == 32
    monkeypatch.setattr(launch, "_TUNED", {})
    assert launch.tune(("int8", 128), run, candidates, file) == launch.Settings(block_n=32) and len(runs) == before
    assert launch.tuned(("int8", 128)) == launch.Settings(block_n=32)
    with pytest.raises(RuntimeError, match="too much shared memory"):
        launch.tune("none", run, [launch.Settings(block_n=128)])
