"""Which KV blocks are free, who holds the others, and which hold a known prefix.

Pure bookkeeping: no torch, no tensors. A block is in one of three states:

- live: held by at least one request;
- cached: held by none, but its content is known by a hash and may be taken up again;
- free: neither.

live + cached + free = total, always.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockManager:
    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._empty = list(range(num_blocks - 1, -1, -1))  # a stack: low ids first, recently used memory again
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._holders = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    @property
    def num_live(self) -> int:
        return self.num_blocks - len(self._empty) - len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can still give."""
        return len(self._empty) + len(self._evictable)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix of the chain `hashes`. Takes none of them."""
        if not self.enable_prefix_caching:
            return []
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_evictable(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` would leave the available ones if they were taken."""
        return sum(1 for block in blocks if self._holders[block] == 0)

    def count_shared(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are held more than once."""
        return sum(1 for block in blocks if self._holders[block] > 1)

    def take(self, blocks: Iterable[int]) -> None:
        """Hold blocks that `lookup` has found."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._evictable[block]
            self._holders[block] += 1

    def allocate(self) -> int | None:
        """A block of unknown content, held once; the least recently used cached block when none is free."""
        if self._empty:
            block = self._empty.pop()
        elif self._evictable:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        else:
            return None
        self._holders[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold of each block. The end of a chain is evicted before its beginning."""
        for block in reversed(blocks):
            holders = self._holders[block] - 1
            if holders < 0:
                raise RuntimeError(f"block {block} was released more often than it was held")
            self._holders[block] = holders
            if holders == 0:
                if self._hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None

    def register(self, block: int, digest: bytes) -> None:
        """Make a live block findable; its KV must have been written. The first block of a content stays the one."""
        if self.enable_prefix_caching and digest not in self._block_of and self._hash_of[block] is None:
            self._hash_of[block] = digest
            self._block_of[digest] = block

    def _forget(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is not None:
            del self._block_of[digest]
            self._hash_of[block] = None
