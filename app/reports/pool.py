"""What an ingress replica knows of the engine replicas: how many there are, and where its router sends requests.

The router (`app.router`) writes it, in Serve's routing thread; admission and the metrics read it. It lives in a module
of its own since the router's travels by value: this one is imported, so both sides have the same. Standard library
only.
"""

import threading
from collections.abc import Callable, Collection


class Pool:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: frozenset[str] = frozenset()
        self._silent: frozenset[str] = frozenset()
        self._on_change: Callable[[int], None] | None = None
        self._routed: dict[str, int] = {}
        self.known = False
        self.prompt_blocks = 0
        self.hit_blocks = 0

    def follow(self, on_change: Callable[[int], None]) -> None:
        """Call `on_change` with the number of replicas that take requests, now if it is known and at each change; in
        the thread that tells of the change."""
        with self._lock:
            self._on_change = on_change
            known = self.known
        if known:
            on_change(self._count())

    def update(self, replicas: Collection[str]) -> None:
        with self._lock:
            before, self.known = (self._count() if self.known else None), True
            self._replicas = frozenset(replicas)
            self._silent &= self._replicas
            self._routed = {name: self._routed.get(name, 0) for name in self._replicas}
        self._tell(before)

    @property
    def silent(self) -> frozenset[str]:
        """Replicas that answer nothing, which get no request while there are others (`app.transport.silence`)."""
        return self._silent

    def set_silent(self, replicas: Collection[str]) -> None:
        with self._lock:
            before = self._count()
            self._silent = self._replicas.intersection(replicas)
        self._tell(before)

    def _count(self) -> int:
        """One that is alone gets requests whether it answers or not."""
        return len(self._replicas - self._silent) or len(self._replicas)

    def _tell(self, before: int | None) -> None:
        if self._on_change is not None and self._count() != before:
            self._on_change(self._count())

    def note(self, replica: str, prompt_blocks: int, hit_blocks: int) -> None:
        """One request went to `replica`, which was thought to have `hit_blocks` of its full prompt blocks."""
        with self._lock:
            self._routed[replica] = self._routed.get(replica, 0) + 1
            self.prompt_blocks += prompt_blocks
            self.hit_blocks += hit_blocks

    @property
    def replicas(self) -> frozenset[str]:
        return self._replicas

    @property
    def num_replicas(self) -> int:
        return len(self._replicas)

    def routed(self) -> dict[str, int]:
        """Requests that this ingress replica has sent to each engine replica that is there."""
        with self._lock:
            return dict(self._routed)


_pools: dict[str, Pool] = {}


def pool_of(deployment: str) -> Pool:
    """What this process knows of an engine deployment of its application."""
    return _pools.setdefault(deployment, Pool())
