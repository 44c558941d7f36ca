"""kvlab: a lab bench for the KV cache of language models. See what a cache strategy costs, and what it breaks."""

from kvlab import keep, place, store
from kvlab.attention import attach, detach
from kvlab.cache import KVCache, resume
from kvlab.dispatch import backend
from kvlab.errors import UnsupportedModel
from kvlab.lab import Generation, Lab, load
from kvlab.memory import Memory
from kvlab.parking import Parking
from kvlab.saving import save
from kvlab.strategy import Strategy

__version__ = "0.1.0"
__all__ = [
    "Generation",
    "KVCache",
    "Lab",
    "Memory",
    "Parking",
    "Strategy",
    "UnsupportedModel",
    "attach",
    "backend",
    "detach",
    "keep",
    "load",
    "place",
    "resume",
    "save",
    "store",
]
