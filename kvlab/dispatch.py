"""What does the work on a device: Triton kernels, machine code made with llvmlite, or torch."""

from __future__ import annotations

import importlib.util
import os

import torch

from kvlab_kernels import cpu


def backend(device: torch.device | str | None = None) -> str:
    """What reads the stored tokens of a decode step on ``device`` (default: the GPU if there is one): "triton", "llvm" or "torch".

    "triton" needs an NVIDIA GPU of compute capability 8.0 or newer; on a CPU ``KVLAB_FUSED=1`` asks for it, where Triton's interpreter is on.
    """
    where = torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if where.type != "cpu":
        able = where.type == "cuda" and not torch.version.hip and importlib.util.find_spec("triton") is not None
        return "triton" if able and torch.cuda.get_device_capability(where) >= (8, 0) else "torch"
    if os.environ.get("KVLAB_FUSED") == "1" and importlib.util.find_spec("triton"):
        from kvlab_kernels import launch

        if launch.interpreting():
            return "triton"
    return "llvm" if cpu.available() else "torch"


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded, in which nothing may wait for the GPU: then numbers are not looked at."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
