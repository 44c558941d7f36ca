"""What a measured number means nothing without: the machine and the versions."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch
import transformers


def machine() -> dict[str, Any]:
    """Processor, cores, GPU and versions: what a time means nothing without."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": sys.version.split()[0],
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
    }
