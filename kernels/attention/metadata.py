"""What attention must know of one step: which tokens belong to which sequence, and where their KV lies."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class AttentionMetadata:
    """One step over a mixed batch of S sequences and T tokens; tensors are on the backend's device.

    Sequence i's queries are tokens query_start[i] to query_start[i + 1]; they are its last positions, and each
    sees the positions up to its own. A sequence without queries is padding and costs nothing. Tokens from
    query_start[S] on belong to no sequence: attention returns zeros for them.

    query_start: int32 [S + 1], starts at 0, never falls.
    seq_lens: int32 [S], tokens of each sequence with this step's.
    block_tables: int32 [R, max_blocks], R >= S; rows stay with their request while it lives.
    rows: int32 [S], the row of block_tables of each sequence, so that no row moves when a request ends.
    slots: int64 [T], block * block_size + offset of each token; -1 writes nothing, for padding and for
        tokens whose KV is already there.
    max_query_len, max_seq_len: bounds over the batch, on the host, for launch sizes.
    """

    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    rows: Tensor
    slots: Tensor
    max_query_len: int
    max_seq_len: int
