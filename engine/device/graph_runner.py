"""Captured CUDA graphs of the padded decode step: two launches a step instead of hundreds.

For each padded size there is one graph of the forward and one of sampling for each `SamplingMode`, with the update of
the next token inside. All share one memory pool; the largest are captured first, so that the smaller ones fit in what
these have taken.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from engine.device.padded_step import PaddedStep
from engine.step import SamplingMode


class GraphRunner:
    """Runs a `PaddedStep` as it is captured in the constructor; forward and sample are the step's own.

    cuda: `torch.cuda`, or a stand-in.
    """

    def __init__(self, step: PaddedStep, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._stream = cuda.Stream()
        self._pool = cuda.graph_pool_handle()
        self._forward: dict[int, Any] = {}
        self._sample: dict[tuple[int, SamplingMode], Any] = {}
        gc.collect()  # a tensor that is freed while a graph is captured would be freed in the graph
        sizes = step.sizes[::-1]
        for size in tqdm(sizes, desc="capturing CUDA graphs", unit="size"):
            step.fill(None, size)
            self._forward[size] = self._capture(partial(step.forward, size))
            for mode in SamplingMode:
                self._sample[size, mode] = self._capture(partial(step.sample, size, mode))

    def _capture(self, run: Callable[[], None]) -> Any:
        """Run once, so that kernels are compiled and libraries have their workspaces, and then to the record."""
        self._stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(self._stream):
            run()
        self._cuda.synchronize()
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        return graph

    def forward(self, size: int) -> None:
        self._forward[size].replay()

    def sample(self, size: int, mode: SamplingMode) -> None:
        self._sample[size, mode].replay()

    @property
    def num_graphs(self) -> int:
        return len(self._forward) + len(self._sample)

    def close(self) -> None:
        """Free the graphs and their pool; idempotent."""
        self._cuda.synchronize()  # one may still be running
        for graph in (*self._forward.values(), *self._sample.values()):
            graph.reset()
        self._forward.clear()
        self._sample.clear()
        self._pool = None
