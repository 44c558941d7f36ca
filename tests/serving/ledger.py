"""An engine without a model, which believes nothing: what lies in each place of each block is written down by itself and looked at before it is used."""

from __future__ import annotations

import random

from kvlab.serving import BlockPool, OutOfBlocks, Plan, PrefixTree, Request, Scheduler


def next_token(tokens: tuple[int, ...]) -> int:
    """What the model would say: any function of everything that was read."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) * 31 + len(tokens)) % 7


class Failing(BlockPool):
    """Refuses at random, as if there were nothing left."""

    def __init__(self, blocks: int, size: int, dice: random.Random, rate: float) -> None:
        super().__init__(blocks, size)
        self.dice, self.rate, self.refused = dice, rate, 0

    def allocate(self, count: int = 1) -> list[int]:
        if count and self.dice.random() < self.rate:
            self.refused += 1
            raise OutOfBlocks("injected")
        return super().allocate(count)


class Ledger:
    """``content[block][place]``: the token whose keys and values lie there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.pool = scheduler, scheduler.pool
        self.content: list[list[int | None]] = [[None] * self.pool.block_size for _ in range(self.pool.blocks)]
        self.away: dict[str, list[list[int | None]]] = {}
        self.steps = self.tokens = 0

    def step(self, now: float) -> list[Request]:
        plan = self.scheduler.plan(now)
        made = self.run(plan)
        finished = self.scheduler.done(plan, made, now)
        self.check()
        self.steps += 1
        self.tokens += plan.tokens
        return finished

    def run(self, plan: Plan) -> dict[str, int]:
        size = self.pool.block_size
        for request, blocks in plan.out:
            self.away[request.id] = [list(self.content[block]) for block in blocks]
        for request, blocks in plan.back:
            for block, saved in zip(blocks, self.away.pop(request.id), strict=True):
                self.content[block] = saved
        for source, target, count in plan.copies:
            assert source != target and self.pool.references(target) == 1
            self.content[target] = [*self.content[source][:count], *[None] * (size - count)]
        made, written = {}, set()
        assert plan.tokens <= self.scheduler.token_budget and len({work.request.id for work in plan.work}) == len(plan.work)
        for work in plan.work:
            request, tokens = work.request, tuple(work.request.tokens)
            for place in range(work.start, work.start + work.count):
                block = request.blocks[place // size]
                assert self.pool.references(block) == 1 + plan.held.count(block), "a block that others read is written"
                assert (block, place % size) not in written, "written twice"
                written.add((block, place % size))
                self.content[block][place % size] = tokens[place]
        for work in plan.work:  # everything that is read is there, and is what was written for these very tokens
            request, tokens = work.request, tuple(work.request.tokens)
            end = work.start + work.count
            for place in range(end):
                if request.blocks[place // size] < 0:
                    assert (
                        self.scheduler.window is not None and self.scheduler.sinks <= place <= work.start - self.scheduler.window
                    )
                else:
                    assert self.content[request.blocks[place // size]][place % size] == tokens[place]
            if work.makes:
                made[request.id] = next_token(tokens)
        return made

    def check(self) -> None:
        """Every reference is somebody's: added up from the requests and the tree, not from the pool."""
        held = [0] * self.pool.blocks
        for request in self.scheduler.requests.values():
            for block in request.blocks:
                if block >= 0:
                    held[block] += 1
            assert request.status != "swapped" or (not request.blocks and request.id in self.away)
        if self.scheduler.tree is not None:
            for node in self.scheduler.tree.nodes():
                held[node.block] += 1
        assert held == [self.pool.references(block) for block in range(self.pool.blocks)]
        assert self.pool.free == held.count(0)


def expected(request: Request) -> list[int]:
    """The tokens that the request makes if it has the model to itself."""
    tokens = list(request.prompt)
    while len(tokens) < request.most:
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(request.prompt) :]


def scheduler_of(
    blocks: int, size: int, *, tree: bool = True, policy: str = "lru", pool: BlockPool | None = None, **how
) -> Scheduler:
    pool = pool or BlockPool(blocks, size)
    return Scheduler(pool, PrefixTree(pool, policy) if tree else None, **how)
