"""The models behind one door: which of them a request is for."""

from collections.abc import Awaitable, Callable, Sequence

from app.openai.errors import ApiError, EngineFault
from app.openai.responses import Body
from app.scrape import ModelStats, Scrape
from app.service import Service


class Catalog:
    """services: of different names. ingresses: as in `Scrape`."""

    def __init__(
        self, services: Sequence[Service], ingresses: Callable[[], Awaitable[list[ModelStats]]] | None = None
    ) -> None:
        self._services = {service.name: service for service in services}
        engines = {service.name: service.client.stats for service in services}
        self.scrape = Scrape(engines, self.stats, ingresses)

    @property
    def names(self) -> list[str]:
        return list(self._services)

    def of(self, name: str | None) -> Service:
        """Of the model that a request names; it need not name the only one. Raises `ApiError` 400 or 404."""
        if name is None:
            if len(self._services) > 1:
                raise ApiError(400, f"model: which one? This server has {self._listed()}.", param="model")
            return next(iter(self._services.values()))
        service = self._services.get(name)
        if service is None:
            message = f"The model {name[:200]!r} does not exist here; this server has {self._listed()}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return service

    def cards(self) -> Body:
        return {"object": "list", "data": [service.card() for service in self._services.values()]}

    async def check_health(self) -> None:
        """Raise `EngineFault` if no model can be served. One that sleeps can."""
        faults = []
        for service in self._services.values():
            try:
                await service.check_health()
            except EngineFault as error:
                faults.append(error)
            else:
                return
        raise faults[0]

    def stats(self) -> ModelStats:
        """Of this ingress alone."""
        return {name: service.stats() for name, service in self._services.items()}

    def _listed(self) -> str:
        return ", ".join(map(repr, self._services))
