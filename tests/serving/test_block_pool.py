"""Blocks are handed out once, counted right, and given back; a prefix is shared where all tokens before it are the same, and only there."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.serving import BlockPool, OutOfBlocks, PrefixTree


def test_all_or_none_and_the_longest_free_first():
    pool = BlockPool(4, 16)
    assert pool.allocate(3) == [0, 1, 2] and (pool.free, pool.used, pool.usage) == (1, 3, 0.75)
    with pytest.raises(OutOfBlocks, match="2 blocks are wanted, 1 of 4"):
        pool.allocate(2)
    assert pool.free == 1
    assert pool.release([1, 0]) == [1, 0] and pool.allocate(3) == [3, 1, 0]
    assert [pool.needed(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_shared_block_is_copied_before_it_is_written():
    pool = BlockPool(3)
    (block,) = pool.allocate()
    assert pool.own(block) == (block, False)
    pool.share([block])
    new, copied = pool.own(block)
    assert copied and new != block and (pool.references(block), pool.references(new)) == (2, 1)  # until it has been copied
    assert pool.release([block]) == []
    pool.share([block])
    pool.allocate()
    with pytest.raises(OutOfBlocks):
        pool.own(block)
    assert pool.references(block) == 2


@pytest.mark.parametrize(
    "do, said",
    [
        (lambda pool: BlockPool(0), "blocks=0"),
        (lambda pool: BlockPool(1, 0), "block_size=0"),
        (lambda pool: pool.allocate(-1), "count=-1"),
        (lambda pool: pool.release([0, 0]), "more often than it is held"),
        (lambda pool: pool.release([1]), "more often than it is held"),
        (lambda pool: pool.share([1]), "block 1 is free"),
        (lambda pool: pool.own(1), "block 1 is free"),
        (lambda pool: pool.references(9), "block 9 is out of range"),
    ],
)
def test_what_cannot_be_changes_nothing(do, said):
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(ValueError, match=said):
        do(pool)
    assert pool.references(0) == 1 and pool.free == 1


def known(pool, tree, tokens, salt=None):
    """Blocks for tokens that nobody knows yet, remembered and let go."""
    blocks = tree.insert(tokens, pool.allocate(pool.needed(len(tokens))), salt)
    pool.release(blocks)
    return blocks


def test_the_longest_beginning_is_found_and_one_token_is_left_to_read():
    pool = BlockPool(16, 4)
    tree = PrefixTree(pool)
    text = list(range(10, 20))
    blocks = known(pool, tree, text)
    assert len(tree) == tree.evictable == 2 and pool.used == 2  # the two that are full
    assert tree.match([*text[:8], 1]).blocks == tuple(blocks[:2])
    same = tree.match(text[:8])
    assert same.blocks == (blocks[0],) and (same.partial, same.count, same.tokens) == (blocks[1], 3, 7)
    other = tree.match([*text[:6], 1, 2, 3])
    assert other.blocks == (blocks[0],) and (other.partial, other.count) == (blocks[1], 2)
    assert tree.match([9, *text]).tokens == 0
    assert tree.match([*text[4:8], 1]).tokens == 0  # the second block, without what came before it


def test_tokens_confirm_what_a_hash_finds():
    class Alike(int):
        def __hash__(self):
            return 1

    pool = BlockPool(8, 2)
    tree = PrefixTree(pool)
    known(pool, tree, [Alike(1), Alike(2)])
    assert tree.match([Alike(3), Alike(4), Alike(5)]).tokens == 0 and tree.match([Alike(1), Alike(2), Alike(5)]).tokens == 2


def test_a_block_counts_who_began_so():
    """Whoever brought it, and each that found it there; not again when that one's own blocks are remembered."""
    pool = BlockPool(8, 2)
    tree = PrefixTree(pool)
    tree.insert([1, 2, 3, 4], pool.allocate(2))
    for end in (5, 6):
        found = tree.match([1, 2, end, end, end])
        pool.share(found.blocks)
        tree.insert([1, 2, end, end], [*found.blocks, *pool.allocate(1)])
    assert {node.tokens: node.times for node in tree.nodes()} == {(1, 2): 3, (3, 4): 1, (5, 5): 1, (6, 6): 1}


def test_what_is_known_takes_the_place_of_a_copy():
    pool = BlockPool(8, 2)
    tree = PrefixTree(pool)
    first = tree.insert([1, 2, 3, 4], pool.allocate(2))
    again = pool.allocate(3)
    second = tree.insert([1, 2, 5, 6], again)
    assert second == [first[0], *again[1:]] and pool.references(again[0]) == 0 and pool.references(first[0]) == 3
    with pytest.raises(ValueError, match="fill 2 blocks"):
        tree.insert([1, 2, 3, 4], first[:1])
    with pytest.raises(ValueError, match="is free"):
        tree.insert([9, 9], [again[0]])


@pytest.mark.parametrize("policy, kept", [("lru", [7, 8]), ("lfu", [1, 2])])
def test_who_goes_first(policy, kept):
    pool = BlockPool(4, 2)
    tree = PrefixTree(pool, policy)
    for text in ([1, 2], [3, 4], [5, 6], [7, 8]):
        known(pool, tree, text)
    for _ in range(3):
        tree.match([1, 2, 0])
    for text in ([3, 4, 0], [5, 6, 0], [7, 8, 0]):
        tree.match(text)
    assert tree.evict(3) == 3 and pool.free == 3
    assert [list(node.tokens) for node in tree.nodes()] == [kept]


def test_what_is_read_stays_and_leaves_go_before_what_leads_to_them():
    pool = BlockPool(4, 2)
    tree = PrefixTree(pool)
    first = tree.insert([1, 2, 3, 4], pool.allocate(2))
    pool.release(first[1:])
    assert tree.evictable == 1 and tree.evict(5) == 1  # a sequence still reads the first
    pool.release(first[:1])
    assert tree.evictable == 1 and tree.evict(5) == 1 and len(tree) == 0 and pool.free == 4
    known(pool, tree, [1, 2, 3, 4, 5, 6])
    assert tree.evict(1) == 1 and tree.match([1, 2, 3, 4, 0]).tokens == 4
    tree.clear()
    assert pool.free == 4 and tree.evictable == 0


def test_a_tenant_meets_nobody_elses_prefix():
    pool = BlockPool(8, 2)
    tree = PrefixTree(pool)
    known(pool, tree, [1, 2, 3, 4], salt="one")
    assert tree.match([1, 2, 3, 4, 5], "two").tokens == tree.match([1, 2, 3, 4, 5]).tokens == 0
    blocks = known(pool, tree, [1, 2, 3, 4], salt="two")
    assert set(blocks).isdisjoint(tree.match([1, 2, 3, 4, 5], "one").blocks)
    with pytest.raises(ValueError, match="policy='mru'"):
        PrefixTree(pool, "mru")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["read", "drop", "evict"]), st.integers(0, 7), st.integers(1, 9)), max_size=60))
def test_counts_are_those_of_a_ledger(steps):
    """Readers come and go over few texts; after each step every block's references are the readers' and the tree's, added up anew."""
    pool, texts = BlockPool(24, 2), [[number % 2, number // 2, number % 3, number, 1, 1, 1, 1] for number in range(8)]
    tree, readers = PrefixTree(pool), []
    for what, which, count in steps:
        if what == "read":
            text = texts[which][:count]
            found = tree.match(text)
            pool.share(found.blocks)
            try:
                fresh = pool.allocate(pool.needed(len(text)) - len(found.blocks))
            except OutOfBlocks:
                pool.release(found.blocks)
                continue
            readers.append(tree.insert(text, [*found.blocks, *fresh]))
        elif what == "drop" and readers:
            pool.release(readers.pop(which % len(readers)))
        elif what == "evict":
            tree.evict(count)
        held = [block for blocks in readers for block in blocks] + [node.block for node in tree.nodes()]
        assert [pool.references(block) for block in range(24)] == [held.count(block) for block in range(24)]
        assert pool.used == len(set(held)) and len(tree) == sum(1 for _ in tree.nodes())
        assert tree.evictable == sum(pool.references(node.block) == 1 for node in tree.nodes())
        tokens = [[*_path(node)] for node in tree.nodes()]
        assert len({tuple(path) for path in tokens}) == len(tokens)


def _path(node):
    return [*(_path(node.parent) if node.parent is not None else []), *node.tokens]
