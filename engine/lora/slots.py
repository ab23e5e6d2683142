"""Which adapter is in which of the device's slots. Bookkeeping: no torch."""

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.lora.adapter import Adapter


class AdapterSlots:
    """A slot stays an adapter's until another needs it: the one that was used least recently, and by nobody now.

    num_loads: adapters brought to the device.
    """

    def __init__(self, count: int) -> None:
        self._slots: OrderedDict[str, int] = OrderedDict()  # by digest, least recently used first
        self._users = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._loads: list[tuple[int, Adapter]] = []
        self.num_loads = 0

    def has_room(self, adapter: "Adapter") -> bool:
        """Whether the adapter has a slot, or could get one."""
        return adapter.digest in self._slots or bool(self._free) or not all(self._users)

    def take(self, adapter: "Adapter") -> int:
        """The slot of an adapter that has room; it is kept until `give_back`."""
        slot = self._slots.get(adapter.digest)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                unused = next(digest for digest, slot in self._slots.items() if not self._users[slot])
                slot = self._slots.pop(unused)
            self._slots[adapter.digest] = slot
            self._loads.append((slot, adapter))
            self.num_loads += 1
        self._users[slot] += 1
        return slot

    def give_back(self, adapter: "Adapter") -> None:
        """One user less."""
        self._users[self._slots[adapter.digest]] -= 1
        self._slots.move_to_end(adapter.digest)

    def loads(self) -> tuple[tuple[int, "Adapter"], ...]:
        """What has got a slot since the last call, and is to be brought there."""
        if not self._loads:
            return ()
        loads, self._loads = tuple(self._loads), []
        return loads

    def forget(self) -> None:
        """What was to be brought to the device may not have arrived; nobody uses a slot."""
        self._free += self._slots.values()
        self._slots.clear()
        self._loads.clear()
