"""The adapters that are kept on the host: read when first asked for, the least recently used dropped."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from engine.lora.adapter import WEIGHTS, Adapter
from engine.lora.peft import CONFIG
from engine.lora.request import AdapterError, LoRARequest

_Stamp = tuple[tuple[int, int, int], ...]


class AdapterCache:
    """Up to `capacity` adapters beside those that requests hold. Thread-safe; one is read at a time.

    read: makes an adapter of a folder, or raises `AdapterError`.
    """

    def __init__(self, read: Callable[[Path], Adapter], capacity: int) -> None:
        self._read = read
        self._capacity = capacity
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()  # by digest, least recently used first
        # By folder, of which files; the one read least recently first.
        self._digests: OrderedDict[str, tuple[_Stamp, str]] = OrderedDict()
        self._max_digests = max(2 * capacity, 64)  # clients may name any number of folders
        self._lock = threading.Lock()

    def get(self, request: LoRARequest) -> Adapter:
        """Raises `AdapterError`, also if the files are not those of `request.digest`."""
        with self._lock:
            digest = request.digest or self._known(request.lora_path)
            adapter = None if digest is None else self._adapters.get(digest)
            if adapter is None:
                adapter = self._load(request)
            self._adapters[adapter.digest] = adapter
            self._adapters.move_to_end(adapter.digest)
            while len(self._adapters) > self._capacity:
                self._adapters.popitem(last=False)
            return adapter

    def _load(self, request: LoRARequest) -> Adapter:
        stamp = _stamp(request.lora_path)
        adapter = self._read(Path(request.lora_path))
        if request.digest is not None and adapter.digest != request.digest:
            raise AdapterError(
                f"The files in {request.lora_path} are not those that were loaded as {request.lora_name!r}: load the "
                "adapter again."
            )
        if stamp is not None:
            self._digests[request.lora_path] = stamp, adapter.digest
            self._digests.move_to_end(request.lora_path)
            if len(self._digests) > self._max_digests:
                self._digests.popitem(last=False)
        return adapter

    def _known(self, path: str) -> str | None:
        """The digest of the files in `path` if they are as they were when they were read."""
        stamp, digest = self._digests.get(path, (None, None))
        return digest if stamp is not None and stamp == _stamp(path) else None


def _stamp(path: str) -> _Stamp | None:
    """What changes when one of the files does."""
    try:
        found = [(Path(path) / name).stat() for name in (CONFIG, WEIGHTS)]
    except (OSError, ValueError):  # of these, what no path may have in it
        return None
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in found)
