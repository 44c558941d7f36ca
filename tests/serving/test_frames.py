"""Frames: what a person is shown of a step is what the scheduler holds, and what lies in the blocks."""

from typing import Any

import pytest

from kvlab.lab import Lab
from kvlab.plots import serving as plots
from kvlab.serving import Engine, Sampling
from kvlab.serving.frames import Coming, watched
from tests.panels.conftest import Characters

GREEDY = {"ignore_eos": True}


@pytest.fixture(scope="module")
def lab(llama: Any) -> Lab:
    return Lab("tiny", llama, Characters())  # type: ignore[arg-type]


def test_two_that_share_by_hand(lab: Lab) -> None:
    """Blocks of 4. A reads 10 tokens; B, three steps later, begins with 6 of them: one block is shared, two tokens of the second are copied."""
    text = list(range(5, 15))
    coming = {
        "A": Coming(0, text, Sampling(max_new_tokens=6, **GREEDY), {}),
        "B": Coming(3, [*text[:6], 60, 61, 62], Sampling(max_new_tokens=2, **GREEDY), {}),
    }
    frames = list(watched(Engine(lab, kv_memory="1 MB", block_size=4), coming))
    first = frames[0]
    mine = [block for block in first.blocks if block.readers]
    assert [block.filled for block in mine] == [4, 4, 2] and first.waste == 2 and first.shared == 0 and first.later == ("B",)
    assert sum(block.cached for block in first.blocks) == 2 and [len(node.tokens) for node in first.nodes] == [4, 4]
    assert first.work == {"A": 10} and first.prompts == ("A",)
    joined = next(now for now in frames if "B" in now.work)
    assert joined.number == 4 and joined.shared == 1 and joined.work == {"A": 1, "B": 3}
    ((source, target),) = joined.copies
    assert joined.blocks[source].readers == ("A",) and joined.blocks[target].readers == ("B",)
    assert joined.blocks[target].filled == 4  # two of A's, 60, 61
    assert frames[-1].finished == ("A",) and not frames[-1].running and frames[-1].used == len(frames[-1].nodes)
    assert "block table" not in plots.block_table_summary(joined) and f"block {source} to {target}" in plots.block_table_summary(
        joined
    )
    spans = plots.spans_of_frames(frames)
    assert [(span.name, span.state, span.start, span.end) for span in spans] == [
        ("A", "reads its prompt", 0, 1),
        ("A", "answers", 1, 6),
        ("B", "reads its prompt", 3, 4),
        ("B", "answers", 4, 5),
    ]


def test_further_answers_share_until_they_write(lab: Lab) -> None:
    """Three answers to one prompt: with dice of their own they part, and each says what it would say alone."""
    dice = [Sampling(max_new_tokens=8, temperature=1.0, seed=seed, **GREEDY) for seed in range(3)]
    engine = Engine(lab, kv_memory="1 MB", block_size=4)
    frames = list(watched(engine, {"A": Coming(0, list(range(5, 15)), dice[0], {"B": dice[1], "C": dice[2]})}))
    assert max(now.shared for now in frames) == 2 and sum(len(now.copies) for now in frames) == 2
    together = next(now for now in frames if len(now.work) == 3)
    assert len({block.readers for block in together.blocks if block.readers}) == 4  # ABC, and each one's own
    assert engine.pool.used == len(engine.tree)


def test_a_fork_says_what_it_would_say_alone(lab: Lab) -> None:
    alone = Engine(lab, kv_memory="1 MB", block_size=4).generate([list(range(5, 15))], Sampling(max_new_tokens=8, **GREEDY))[0]
    for most in (4, 8):
        engine = Engine(lab, kv_memory="1 MB", block_size=4)
        first = engine.add(list(range(5, 15)), Sampling(max_new_tokens=8, **GREEDY))
        engine.step()
        other = engine.fork(first.id, Sampling(max_new_tokens=most, **GREEDY))
        while engine.busy:
            engine.step()
        assert tuple(first.output) == alone.tokens and tuple(other.output) == alone.tokens[:most]
    with pytest.raises(ValueError, match="not running"):
        engine.fork(first.id)
    held = engine.add([5, 6], Sampling(max_new_tokens=4))
    engine.step()
    with pytest.raises(ValueError, match="max_new_tokens=9000"):
        engine.fork(held.id, Sampling(max_new_tokens=9000))


def test_a_fork_goes_on_with_the_same_dice_or_its_own(lab: Lab) -> None:
    engine = Engine(lab, kv_memory="1 MB", block_size=4)
    first = engine.add(list(range(5, 15)), Sampling(max_new_tokens=12, temperature=1.0, **GREEDY))
    for _ in range(3):
        engine.step()
    with pytest.raises(ValueError, match="max_new_tokens=3 is out of range .allowed: more than the 3 tokens"):
        engine.fork(first.id, Sampling(max_new_tokens=3))
    same, other = engine.fork(first.id), engine.fork(first.id, Sampling(max_new_tokens=12, temperature=1.0, seed=9, **GREEDY))
    while engine.busy:
        engine.step()
    assert same.output == first.output and other.output[:3] == first.output[:3] and other.output != first.output


def test_the_tree_is_drawn_without_crossings(lab: Lab) -> None:
    engine = Engine(lab, kv_memory="1 MB", block_size=4)
    engine.generate([[5, 6, 7, 8, *range(9 + n, 18 + n)] for n in (0, 20, 40)], Sampling(max_new_tokens=2, **GREEDY))
    from kvlab.serving.frames import frame

    nodes = frame(engine.scheduler, engine.plan, 1).nodes
    places = plots._places(nodes)
    assert len(places) == len(nodes) == 7 and len({places[node.block] for node in nodes}) == 7
    root = next(node for node in nodes if node.parent == -1)
    assert places[root.block] == (4, 1.0) and root.tokens == (5, 6, 7, 8)  # before the middle of its three branches
    assert "7 blocks, 28 tokens, in 3 branches" in plots.prefix_tree_summary(nodes, 4)
