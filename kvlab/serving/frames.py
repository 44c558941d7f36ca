"""Frames: how blocks, tree and requests stand after a step, to be looked at while the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlab.serving.request import FINISHED, Sampling
from kvlab.serving.scheduler import Plan, Scheduler

if TYPE_CHECKING:
    from kvlab.serving.engine import Engine


@dataclass(frozen=True)
class Held:
    """One block. ``readers``: ids of the requests that hold it; ``filled``: its tokens; ``cached``: whether the prefix tree holds it too; ``copied``: the block that it was copied from in this step, or None."""

    readers: tuple[str, ...] = ()
    filled: int = 0
    cached: bool = False
    copied: int | None = None


@dataclass(frozen=True)
class Leaf:
    """One node of the prefix tree: ``block``, the block of its ``parent`` (-1: a beginning), its ``tokens``, how many requests read it, how often it was met."""

    block: int
    parent: int
    tokens: tuple[int, ...]
    readers: int
    times: int


@dataclass(frozen=True)
class Frame:
    """After step ``number``. ``work``: request id -> tokens that the step computed for it; ``prompts``: ids of those that read their prompt; ``later``: of those
    that have not come yet."""

    number: int
    blocks: tuple[Held, ...]
    block_size: int
    nodes: tuple[Leaf, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    away: tuple[str, ...]  # put away, to be brought back
    finished: tuple[str, ...]  # with this step
    work: dict[str, int]
    prompts: tuple[str, ...]
    later: tuple[str, ...] = ()

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return sum(bool(block.readers) or block.cached for block in self.blocks)

    @property
    def shared(self) -> int:
        """Blocks that two requests or more read."""
        return sum(len(block.readers) > 1 for block in self.blocks)

    @property
    def waste(self) -> int:
        """Places with no token in the blocks of requests."""
        return sum(self.block_size - block.filled for block in self.blocks if block.readers)

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """(from, to) of this step's copies."""
        return tuple((block.copied, number) for number, block in enumerate(self.blocks) if block.copied is not None)


def frame(scheduler: Scheduler, plan: Plan, number: int) -> Frame:
    """How everything stands after the step that computed ``plan``."""
    pool, size = scheduler.pool, scheduler.pool.block_size
    readers: list[list[str]] = [[] for _ in range(pool.blocks)]
    filled = [0] * pool.blocks
    for request in scheduler.running:
        for at, block in enumerate(request.blocks):
            if block >= 0:
                readers[block].append(request.id)
                filled[block] = max(filled[block], min(size, max(0, request.computed - at * size)))
    copied = {target: source for source, target, _ in plan.copies}
    nodes = [] if scheduler.tree is None else list(scheduler.tree.nodes())
    cached = {node.block for node in nodes}
    for block in cached:
        filled[block] = size
    return Frame(
        number=number,
        blocks=tuple(
            Held(
                tuple(readers[block]),
                filled[block],
                block in cached,
                copied.get(block) if readers[block] else None,
            )
            for block in range(pool.blocks)
        ),
        block_size=size,
        nodes=tuple(
            Leaf(node.block, -1 if node.parent is None else node.parent.block, node.tokens, len(readers[node.block]), node.times)
            for node in nodes
        ),
        running=tuple(request.id for request in scheduler.running),
        waiting=tuple(request.id for request in scheduler.waiting if request.status != "swapped"),
        away=tuple(request.id for request in scheduler.waiting if request.status == "swapped"),
        finished=tuple(work.request.id for work in plan.work if work.request.status == FINISHED),
        work={work.request.id: work.count for work in plan.work},
        prompts=tuple(work.request.id for work in plan.work if work.start < len(work.request.prompt)),
    )


@dataclass(frozen=True)
class Coming:
    """A request that comes after so many ``steps``: its ``prompt`` and how it is answered; further answers, by their ids, begin at its first token."""

    steps: int
    prompt: Sequence[int]
    sampling: Sampling
    further: Mapping[str, Sampling]


def watched(engine: Engine, coming: Mapping[str, Coming], most: int = 1000) -> Iterator[Frame]:
    """Have the engine serve ``coming`` (by id), up to ``most`` steps; a frame after each step. While nobody is there, no step is counted."""
    todo, number = dict(sorted(coming.items(), key=lambda item: item[1].steps)), 0
    further = {name: dict(one.further) for name, one in coming.items()}
    idle = 0  # steps that nobody took
    while (todo or engine.busy) and number < most:
        if todo and not engine.busy:
            idle = max(idle, next(iter(todo.values())).steps - number)
        while todo and next(iter(todo.values())).steps <= number + idle:
            name = next(iter(todo))
            one = todo.pop(name)
            engine.add(one.prompt, one.sampling, id=name)
        engine.step()
        number += 1
        now = frame(engine.scheduler, engine.plan, number)
        for request in list(engine.scheduler.running):
            while request.output and (rest := further.get(request.id)):
                if len(engine.scheduler.running) >= engine.scheduler.max_running:
                    break
                new = next(iter(rest))
                engine.fork(request.id, rest.pop(new), new=new)
        yield replace(now, later=tuple(todo))
