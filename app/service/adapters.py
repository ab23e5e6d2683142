"""The LoRA adapters that are served beside a model: each has a name, under which requests ask for it.

The ingress replicas know them, and each request brings its adapter's folder and digest along: an engine replica reads
what it does not have, so one that starts later needs to be told nothing, and a request that goes on elsewhere takes its
adapter with it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from app.engine_client import EngineClient
from app.openai.errors import ApiError
from engine.lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """request: with the digest of the files that were loaded. created: seconds since 1970."""

    request: LoRARequest
    created: int

    @property
    def name(self) -> str:
        return self.request.lora_name


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """What ingress replicas tell each other: that a name means `adapter` of `model`, or nothing there.

    at: when that was decided; of two changes of one name the later one counts. 0: by the settings.
    """

    model: str
    name: str
    adapter: ServedAdapter | None
    at: int


Tell = Callable[[AdapterChange], Awaitable[None]]
"""Gives a change to the other ingress replicas."""

MAX_UNLOADED = 1000
"""Names remembered that mean nothing any more, for an ingress replica that has missed it."""


class Adapters:
    """base: the model's own name. allow_updates: whether clients may load and unload."""

    def __init__(self, base: str, client: EngineClient, allow_updates: bool = False) -> None:
        self._base = base
        self._client = client
        self._allow_updates = allow_updates
        self._last: dict[str, AdapterChange] = {}  # of each name, in the order in which they came
        self._lock = asyncio.Lock()

    def __contains__(self, name: str) -> bool:
        return self._served(name) is not None

    def find(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request's `model` names; None for the model itself."""
        served = None if name is None else self._served(name)
        return None if served is None else served.request

    def all(self) -> list[ServedAdapter]:
        return [change.adapter for change in self._last.values() if change.adapter is not None]

    def changes(self) -> list[AdapterChange]:
        """All that another ingress replica may have missed: what is served, and what no more."""
        return list(self._last.values())

    async def load_all(self, modules: Mapping[str, str]) -> None:
        """Load the adapters of the settings: folders by name. Raises `ApiError` for the first that cannot be."""
        for name, path in modules.items():
            self.learn(AdapterChange(self._base, name, await self._read(name, path), at=0))

    async def load(self, name: str, path: str, in_place: bool, tell: Tell) -> str:
        """Returns what the client is told. in_place: in that of one with this name. Raises `ApiError`."""
        self._check_allowed()
        async with self._lock:  # two loads of one name come one after the other
            if name in self and not in_place:
                raise ApiError(
                    400,
                    f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    param="lora_name",
                    code="invalid_value",
                )
            await self._change(name, await self._read(name, path), tell)
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, name: str, tell: Tell) -> str:
        """Requests that run with it go on. Returns what the client is told. Raises `ApiError`."""
        self._check_allowed()
        async with self._lock:
            if name not in self:
                raise ApiError(
                    404, f"The lora adapter {name!r} cannot be found.", param="lora_name", code="model_not_found"
                )
            await self._change(name, None, tell)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def learn(self, change: AdapterChange) -> None:
        """Of another ingress replica, or of this one."""
        known = self._last.get(change.name)
        if known is not None and known.at >= change.at:
            return
        self._last.pop(change.name, None)
        self._last[change.name] = change
        unloaded = [name for name, last in self._last.items() if last.adapter is None]
        for name in unloaded[:-MAX_UNLOADED]:
            del self._last[name]

    def _served(self, name: str) -> ServedAdapter | None:
        change = self._last.get(name)
        return None if change is None else change.adapter

    async def _read(self, name: str, path: str) -> ServedAdapter:
        request = LoRARequest(name, 1, path)
        digest = await self._client.load_adapter(request)
        return ServedAdapter(replace(request, digest=digest), int(time.time()))

    async def _change(self, name: str, adapter: ServedAdapter | None, tell: Tell) -> None:
        known = self._last.get(name)
        # Later than what it follows, whatever the clocks of the two machines say.
        at = max(time.time_ns(), 0 if known is None else known.at + 1)
        change = AdapterChange(self._base, name, adapter, at)
        self.learn(change)
        await tell(change)

    def _check_allowed(self) -> None:
        if not self._allow_updates:
            raise ApiError(
                404,
                "Adapters cannot be loaded or unloaded here while the server runs: set allow_runtime_lora_updating for "
                "that, or name them in lora_modules.",
                code="not_found",
            )
