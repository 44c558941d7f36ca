"""The kernels are run by Triton's interpreter, on CPU tensors; it must be switched on before anything imports triton."""

import os
import sys

import pytest
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")
if "triton" in sys.modules and not sys.modules["triton"].knobs.runtime.interpret:
    raise pytest.UsageError("triton was imported before the interpreter was switched on: run the tests with TRITON_INTERPRET=1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def poison(monkeypatch):
    """Memory that a kernel must fill comes full of NaN (255 for codes), so that what it leaves out shows."""
    plain = torch.empty

    def empty(*args, **kwargs):
        x = plain(*args, **kwargs)
        return x.fill_(float("nan") if x.is_floating_point() else 255) if x.device.type == "cpu" else x

    monkeypatch.setattr(torch, "empty", empty)
