import pytest

from engine.block_hash import block_hashes
from engine.block_manager import BlockManager


def counts(blocks: BlockManager) -> tuple[int, int, int]:
    return blocks.num_live, blocks.num_cached, blocks.num_free


def test_a_block_is_live_then_cached_then_found_again() -> None:
    blocks = BlockManager(4)
    (digest,) = block_hashes([1, 2], 2)
    block = blocks.allocate()
    assert block is not None
    assert counts(blocks) == (1, 0, 3)
    blocks.register(block, digest)
    blocks.release([block])
    assert counts(blocks) == (0, 1, 3)
    assert blocks.lookup([digest]) == [block]
    blocks.take([block])
    assert counts(blocks) == (1, 0, 3)


def test_a_block_without_a_hash_is_free_when_released() -> None:
    blocks = BlockManager(2)
    block = blocks.allocate()
    assert block is not None
    blocks.release([block])
    assert counts(blocks) == (0, 0, 2)


def test_a_block_is_no_hit_before_it_is_registered() -> None:
    blocks = BlockManager(2)
    blocks.allocate()
    assert blocks.lookup(block_hashes([1, 2], 2)) == []


def test_the_least_recently_used_block_is_evicted_and_its_hash_dies() -> None:
    blocks = BlockManager(2)
    hashes = [block_hashes([i], 1)[0] for i in range(3)]
    held = []
    for digest in hashes[:2]:
        block = blocks.allocate()
        assert block is not None
        blocks.register(block, digest)
        held.append(block)
    for block in held:
        blocks.release([block])
    assert blocks.lookup(hashes[:1]) == held[:1]
    blocks.take(held[:1])
    blocks.release(held[:1])  # used again: now the other one is the older
    assert blocks.allocate() == held[1]
    assert blocks.lookup(hashes[1:2]) == []
    assert blocks.lookup(hashes[:1]) == held[:1]


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    blocks = BlockManager(3)
    hashes = block_hashes([1, 2, 3], 1)
    chain = []
    for digest in hashes:
        block = blocks.allocate()
        assert block is not None
        blocks.register(block, digest)
        chain.append(block)
    blocks.release(chain)
    blocks.allocate()
    assert blocks.lookup(hashes) == chain[:2]


def test_an_empty_pool_gives_none_and_a_shared_block_outlives_one_holder() -> None:
    blocks = BlockManager(1)
    block = blocks.allocate()
    assert block == 0
    assert blocks.allocate() is None
    blocks.register(0, block_hashes([1], 1)[0])
    blocks.take([0])
    blocks.release([0])
    assert counts(blocks) == (1, 0, 0)
    blocks.release([0])
    assert counts(blocks) == (0, 1, 0)


def test_releasing_twice_is_an_error() -> None:
    blocks = BlockManager(1)
    block = blocks.allocate()
    assert block is not None
    blocks.release([block])
    with pytest.raises(RuntimeError, match="more often"):
        blocks.release([block])


def test_without_prefix_caching_nothing_is_found() -> None:
    blocks = BlockManager(1, enable_prefix_caching=False)
    (digest,) = block_hashes([1], 1)
    block = blocks.allocate()
    assert block is not None
    blocks.register(block, digest)
    blocks.release([block])
    assert counts(blocks) == (0, 0, 1)
    assert blocks.lookup([digest]) == []


def test_hashes_are_chained_salted_and_only_of_full_blocks() -> None:
    hashes = block_hashes([1, 2, 3, 4, 5], 2)
    assert len(hashes) == 2
    assert block_hashes([3, 4], 2)[0] != hashes[1], "the same tokens after another prefix are another block"
    assert block_hashes([3, 4], 2, parent=hashes[0]) == hashes[1:]
    assert block_hashes([1, 2], 2, salt="tenant") != hashes[:1]
    assert {len(digest) for digest in hashes} == {16}
