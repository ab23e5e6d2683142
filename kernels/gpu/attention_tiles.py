"""Tile sizes and split counts of the attention kernel: pure functions of the card, the shapes and host-known bounds.

A small table takes the place of tuning at run time, which would time kernels inside a captured step. Shared memory is
what bounds the tiles: 64 KB a block on cc 7.5, 99 on 8.6, 8.9 and 12.0, 163 on 8.0, 227 on 9.0 and 10.0; tests compile
every entry and read what it takes.
"""

from dataclasses import dataclass

import torch

from kernels.attention.backend import FP8
from kernels.gpu import Gpu

MAX_SPLITS = 32
_SPLIT_KEYS = 128  # keys that are worth a program of their own


@dataclass(frozen=True, slots=True)
class Tiles:
    """decode: one query a sequence. dot: by tensor cores; else by sums of products, in float32.

    block_m: rows (queries times heads of a group), block_n: keys. precision: of tl.dot on float32.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    decode: bool
    dot: bool = True
    precision: str = "ieee"


def has_dot(capability: tuple[int, int]) -> bool:
    """Whether Triton computes tl.dot with tensor cores on the card."""
    return capability >= (8, 0)


def choose_tiles(
    gpu: Gpu, head_dim: int, group: int, max_query_len: int, dtype: torch.dtype, stored: torch.dtype
) -> Tiles:
    """group: query heads of a KV head; dtype: of the queries; stored: what the cache holds.

    On a card without tensor cores for tl.dot only decodes have tiles: max_query_len is 1 there.
    """
    width = 1 << (head_dim - 1).bit_length()  # head_dim as the kernel pads it
    rows = 1 << (group - 1).bit_length()
    if not has_dot(gpu.capability):
        return Tiles(rows, max(1, 4096 // (rows * width)), 4, 1, decode=True, dot=False)
    wide = dtype is torch.float32
    precision = "tf32x3" if wide else "ieee"
    roomy = gpu.capability in ((8, 0), (9, 0), (10, 0))
    if max_query_len <= 1:
        block_n = 128 if width <= 128 and stored is not FP8 else 64  # decoding takes registers
        if not roomy and stored is not torch.int8:
            # Two blocks a multiprocessor at the least: one loads while another computes.
            block_n = 64 if width <= 128 else 32
        if wide:
            block_n = 32
        stages = 3 if roomy and not wide else 2
        return Tiles(max(16, rows), block_n, 4, stages, decode=True, precision=precision)
    if wide:
        return Tiles(max(16, rows), 32, 4, 1 if width > 128 else 2, decode=False, precision=precision)
    if max_query_len * group <= 32:  # a few tokens each: drafts that are checked, ends of prompts
        return Tiles(max(32, rows), 64, 4, 2, decode=False)
    if gpu.capability[0] in (9, 10):  # their tensor cores take 64 rows a warp group and the tiles from shared memory
        return Tiles(max(128, rows), 64 if width <= 128 else 32, 8, 3 if width <= 128 else 2, decode=False)
    # Older and smaller cards hold queries and sums in registers, 255 a thread: wider tiles would spill.
    return Tiles(max(64 if width <= 128 else 32, rows), 32, 4, 2, decode=False)


def choose_splits(gpu: Gpu, programs: int, max_seq_len: int) -> int:
    """Parts of each sequence's keys: a power of two, so that there are about two programs a multiprocessor.

    programs: of the launch without splits, padding included. max_seq_len: a bound; a sequence shorter than it is split
    as evenly, so a captured launch may give the longest that there can be.
    """
    splits = 1
    while (
        splits < MAX_SPLITS
        and programs * splits * 2 <= 4 * gpu.multiprocessors
        and max_seq_len >= splits * 2 * _SPLIT_KEYS
    ):
        splits *= 2
    return splits
