"""The models behind one door, and their adapters: which of them a request is for."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from app.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from app.openai.errors import ApiError, EngineFault
from app.openai.responses import Body
from app.reports.scrape import ModelStats, Scrape
from app.service.adapters import AdapterChange, Tell
from app.service.service import Service

_LISTED = 10


async def _nobody_else(_: AdapterChange) -> None:
    return None


class Catalog:
    """services: of different names. ingresses: as in `Scrape`. tell: for adapters that are loaded or unloaded here."""

    def __init__(
        self,
        services: Sequence[Service],
        ingresses: Callable[[], Awaitable[list[ModelStats]]] | None = None,
        tell: Tell = _nobody_else,
    ) -> None:
        self._tell = tell
        self._loading = asyncio.Lock()
        self._services = {service.name: service for service in services}
        engines = {service.name: service.client.stats for service in services}
        self.scrape = Scrape(engines, self.stats, ingresses)

    @property
    def names(self) -> list[str]:
        return list(self._services)

    def of(self, name: str | None) -> Service:
        """Of the model that a request names, or whose adapter; it need not name the only one.

        Raises `ApiError` 400 or 404.
        """
        if name is None:
            if len(self._services) > 1:
                raise ApiError(400, f"model: which one? This server has {self._listed()}.", param="model")
            return next(iter(self._services.values()))
        service = self._services.get(name) or self._with_adapter(name)
        if service is None:
            message = f"The model {name[:200]!r} does not exist here; this server has {self._listed()}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return service

    def cards(self) -> Body:
        return {"object": "list", "data": [card for service in self._services.values() for card in service.cards()]}

    def card(self, name: str) -> Body:
        """Raises `ApiError` 404."""
        return next(card for card in self.of(name).cards() if card["id"] == name)

    async def load_adapter(self, body: LoadAdapterRequest) -> str:
        """Returns what the client is told. Raises `ApiError`."""
        name, service = body.lora_name, self.of(body.model)
        async with self._loading:  # two models' adapters of one name come one after the other
            if name in self._services or self._with_adapter(name) not in (None, service):
                whose = "that of a model" if name in self._services else "that of another model's adapter"
                message = f"The name {name!r} is {whose}: give the adapter another one."
                raise ApiError(400, message, param="lora_name", code="invalid_value")
            return await service.adapters.load(name, body.lora_path, body.load_inplace, self._tell)

    async def unload_adapter(self, body: UnloadAdapterRequest) -> str:
        """Returns what the client is told. Raises `ApiError`."""
        service = self._with_adapter(body.lora_name) or next(iter(self._services.values()))
        return await service.adapters.unload(body.lora_name, self._tell)

    def learn(self, changes: Sequence[AdapterChange]) -> None:
        """Of another ingress replica, which may have other models while they are replaced."""
        for change in changes:
            if (service := self._services.get(change.model)) is not None:
                service.adapters.learn(change)

    def adapters(self) -> list[AdapterChange]:
        """For an ingress replica that starts, or has missed some."""
        return [change for service in self._services.values() for change in service.adapters.changes()]

    async def check_health(self) -> None:
        """As soon as one model can be served; one that sleeps can. Raises `EngineFault` if none can."""
        checks = [asyncio.ensure_future(service.check_health()) for service in self._services.values()]
        try:
            faults = []
            for check in asyncio.as_completed(checks):
                try:
                    await check
                except EngineFault as error:
                    faults.append(error)
                else:
                    return
            raise faults[0]
        finally:
            for each in checks:
                each.cancel()

    def stats(self) -> ModelStats:
        """Of this ingress alone."""
        return {name: service.stats() for name, service in self._services.items()}

    def _listed(self) -> str:
        adapters = (adapter.name for service in self._services.values() for adapter in service.adapters.all())
        names = [*self._services, *adapters]
        return ", ".join(map(repr, names[:_LISTED])) + (" and more" if len(names) > _LISTED else "")

    def _with_adapter(self, name: str) -> Service | None:
        return next((service for service in self._services.values() if name in service.adapters), None)
