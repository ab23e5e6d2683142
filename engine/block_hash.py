"""Digests of full KV blocks, chained so that equal digests mean equal prefixes.

Used by the scheduler for the prefix cache and by the ingress for routing; both must agree, so it lives alone.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from sys import byteorder

DIGEST_BYTES = 16
"""128 bits of a cryptographic hash: a collision would hand one user's KV to another."""


def root_hash(salt: str | None = None, adapter: str = "") -> bytes:
    """The parent of a first block. Requests with different salts share no blocks, nor do those with different adapters.

    adapter: the digest of its files (`engine.lora.adapter.Adapter`), in hexadecimal; none for the model as it is.
    """
    data, key = (salt or "").encode("utf-8", "surrogatepass"), bytes.fromhex(adapter)
    return blake2b(data, digest_size=DIGEST_BYTES, key=key, person=b"root").digest()


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    salt: str | None = None,
    parent: bytes | None = None,
    adapter: str = "",
) -> list[bytes]:
    """Digest of each full block of `token_ids`, in order; a last block that is not full has none.

    `parent`: the digest of the block before the first one given, for extending a chain.
    """
    ids = array("i", token_ids)
    if byteorder == "big":
        ids.byteswap()
    return chain(ids.tobytes(), block_size, root_hash(salt, adapter) if parent is None else parent)


def chain(data: bytes, block_size: int, parent: bytes) -> list[bytes]:
    """As `block_hashes`, of token ids that are little-endian int32 already."""
    step = 4 * block_size
    hashes = []
    for start in range(0, len(data) - step + 1, step):
        parent = child(parent, data[start : start + step])
        hashes.append(parent)
    return hashes


def child(parent: bytes, block: bytes) -> bytes:
    """The digest of one more block, of token ids that are little-endian int32 already."""
    return blake2b(parent + block, digest_size=DIGEST_BYTES).digest()
