"""Many requests at once: memory in blocks, shared beginnings, batches that change at every step. A :class:`kvlab.Strategy` says what goes into the blocks."""

from kvlab.serving.block_pool import BlockPool, OutOfBlocks
from kvlab.serving.engine import Completion, Engine, Metrics
from kvlab.serving.prefix_tree import Match, PrefixTree
from kvlab.serving.request import Request, Sampling
from kvlab.serving.reservation import Reservation, reserve
from kvlab.serving.scheduler import Plan, Scheduler, Work
from kvlab.serving.served import Served, run_trace
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
    "Reservation",
    "Sampling",
    "Scheduler",
    "Served",
    "Work",
    "reserve",
    "run_trace",
    "simulate",
]
