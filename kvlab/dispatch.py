"""What does the work on a device: Triton kernels, machine code made with llvmlite, or torch."""

from __future__ import annotations

import importlib.util
import os

import torch

from kvlab_kernels import cpu


def backend(device: torch.device | str | None = None) -> str:
    """What reads the stored tokens of a decode step on ``device`` (default: the GPU if there is one): "triton", "llvm" or "torch"."""
    kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    wanted = kind == "cuda" or os.environ.get("KVLAB_FUSED") == "1"
    if wanted and importlib.util.find_spec("triton"):
        return "triton"
    return "llvm" if kind == "cpu" and cpu.available() else "torch"
