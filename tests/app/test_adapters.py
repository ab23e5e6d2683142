"""Names of adapters over several models and several ingress replicas."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.adapters import AdapterChange, Adapters, ServedAdapter
from app.catalog import Catalog
from app.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from app.openai.errors import ApiError
from engine.lora.request import LoRARequest


class Client:
    """Reads any folder; its digest is the folder's name."""

    async def stats(self) -> list[Any]:
        return []

    async def load_adapter(self, request: LoRARequest) -> str:
        await asyncio.sleep(0)
        if "bad" in request.lora_path:
            raise ApiError(400, "bad", param="lora_path")
        return request.lora_path.rsplit("/", 1)[-1]


def catalog(tell: Any, *names: str) -> Catalog:
    services: list[Any] = []
    for name in names:
        client = Client()
        adapters = Adapters(name, client, allow_updates=True)
        services.append(SimpleNamespace(name=name, client=client, adapters=adapters))
    return Catalog(services, tell=tell)


async def test_a_change_of_one_ingress_is_a_change_of_all_and_of_one_that_starts_later() -> None:
    others: list[Catalog] = []

    async def tell(change: AdapterChange) -> None:
        for other in others:
            other.learn([change])

    here, there = catalog(tell, "a", "b"), catalog(tell, "a", "b")
    others[:] = [here, there]
    await here.load_adapter(LoadAdapterRequest(lora_name="mine", lora_path="/x/one", model="b"))
    late = catalog(tell, "a", "b")
    late.learn(here.adapters())
    for each in (here, there, late):
        found = each.of("mine")
        assert found.name == "b"
        assert found.adapters.find("mine") == LoRARequest("mine", 1, "/x/one", "one")
        assert each.of("a").adapters.find("a") is None
    others.append(late)
    await there.unload_adapter(UnloadAdapterRequest(lora_name="mine"))
    for each in others:
        with pytest.raises(ApiError, match="'mine' does not exist here; this server has 'a', 'b'"):
            each.of("mine")


async def test_a_name_means_one_thing() -> None:
    async def tell(_: AdapterChange) -> None:
        pass

    it = catalog(tell, "a", "b")
    await it.load_adapter(LoadAdapterRequest(lora_name="mine", lora_path="/one", model="a"))
    for name, model, message in (
        ("b", "a", "'b' is that of a model"),
        ("mine", "b", "'mine' is that of another model's adapter"),
        ("mine", "a", "has already been loaded"),
        ("other", None, "model: which one"),
    ):
        with pytest.raises(ApiError, match=message) as caught:
            await it.load_adapter(LoadAdapterRequest(lora_name=name, lora_path="/two", model=model))
        assert caught.value.status == 400


async def test_of_two_loads_of_one_name_at_once_for_two_models_one_is_refused() -> None:
    async def tell(_: AdapterChange) -> None:
        pass

    it = catalog(tell, "a", "b")
    loads = [
        it.load_adapter(LoadAdapterRequest(lora_name="mine", lora_path="/one", model=model)) for model in ("a", "b")
    ]
    first, second = await asyncio.gather(*loads, return_exceptions=True)
    assert isinstance(first, str)
    assert isinstance(second, ApiError)
    assert len(it.adapters()) == 1


async def test_a_load_in_place_that_fails_leaves_what_was_there() -> None:
    told = []

    async def tell(change: AdapterChange) -> None:
        told.append(change)

    it = catalog(tell, "a")
    await it.load_adapter(LoadAdapterRequest(lora_name="mine", lora_path="/one"))
    with pytest.raises(ApiError, match="bad"):
        await it.load_adapter(LoadAdapterRequest(lora_name="mine", lora_path="/bad", load_inplace=True))
    assert it.of("mine").adapters.find("mine") == LoRARequest("mine", 1, "/one", "one")
    await it.load_adapter(LoadAdapterRequest(lora_name="mine", lora_path="/two", load_inplace=True))
    assert it.of("mine").adapters.find("mine") == LoRARequest("mine", 1, "/two", "two")
    assert [change.adapter and change.adapter.request.digest for change in told] == ["one", "two"]


def test_news_that_are_old_are_none() -> None:
    adapters = Adapters("a", Client())
    new, old = (ServedAdapter(LoRARequest("mine", 1, path, path[1:]), at) for path, at in (("/new", 20), ("/old", 10)))
    adapters.learn("mine", new)
    adapters.learn("mine", old)
    assert adapters.all() == [new]
