"""Many requests at once: memory in blocks, shared beginnings, batches that change at every step. A :class:`kvlab.Strategy` says what goes into the blocks."""

from kvlab.serving.block_pool import BlockPool, OutOfBlocks
from kvlab.serving.engine import Completion, Engine, Metrics
from kvlab.serving.prefix_tree import Match, PrefixTree
from kvlab.serving.request import Request, Sampling
from kvlab.serving.scheduler import Plan, Scheduler, Work
from kvlab.serving.served import Served, serve
from kvlab.serving.simulate import simulate

__all__ = [
    "BlockPool",
    "Completion",
    "Engine",
    "Match",
    "Metrics",
    "OutOfBlocks",
    "Plan",
    "PrefixTree",
    "Request",
    "Sampling",
    "Scheduler",
    "Served",
    "Work",
    "serve",
    "simulate",
]
