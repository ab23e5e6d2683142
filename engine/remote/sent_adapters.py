"""Adapters travel to ranks once: when one that they have kept gets a slot again, the plan has its digest alone."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.step import StepAdapters

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter

_KEPT_PER_SLOT = 2
"""Adapters that a rank keeps on the host for each slot of its device: those in the slots, and as many that were."""

WiredLoads = Sequence[tuple[int, str, "Adapter | None"]]
"""Slot, digest, and the adapter if the other side has not kept it."""


class _Kept:
    """Both ends use theirs for the same adapters in the same order, so both drop the same ones."""

    def __init__(self, max_loras: int) -> None:
        self._capacity = max(1, _KEPT_PER_SLOT * max_loras)
        self._adapters: OrderedDict[str, Adapter | None] = OrderedDict()  # least recently used first

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def get(self, digest: str) -> "Adapter | None":
        return self._adapters[digest]

    def use(self, digest: str, adapter: "Adapter | None") -> None:
        self._adapters[digest] = adapter
        self._adapters.move_to_end(digest)
        if len(self._adapters) > self._capacity:
            self._adapters.popitem(last=False)


class AdapterSender:
    def __init__(self, max_loras: int) -> None:
        self._kept = _Kept(max_loras)

    def pack(self, adapters: StepAdapters) -> tuple[StepAdapters, WiredLoads]:
        """What is to be sent, for `AdapterReceiver.unpack`."""
        loads = []
        for slot, adapter in adapters.loads:
            loads.append((slot, adapter.digest, None if adapter.digest in self._kept else adapter))
            self._kept.use(adapter.digest, None)
        return replace(adapters, loads=()), loads


class AdapterReceiver:
    def __init__(self, max_loras: int) -> None:
        self._kept = _Kept(max_loras)

    def unpack(self, adapters: StepAdapters, wired: WiredLoads) -> StepAdapters:
        loads = []
        for slot, digest, sent in wired:
            adapter = sent or self._kept.get(digest)
            assert adapter is not None
            self._kept.use(digest, adapter)
            loads.append((slot, adapter))
        return replace(adapters, loads=tuple(loads))
