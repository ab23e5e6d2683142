"""Names of adapters over several models and several ingress replicas."""

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from app.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from app.openai.errors import ApiError
from app.service.adapters import AdapterChange, Adapters, ServedAdapter
from app.service.catalog import Catalog
from app.service.peers import ASK_AGAIN_S, keep_learning
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


def change(name: str, at: int, path: str | None) -> AdapterChange:
    adapter = None if path is None else ServedAdapter(LoRARequest(name, 1, path, path[1:]), created=0)
    return AdapterChange("a", name, adapter, at)


def test_of_two_changes_the_later_one_counts_in_whichever_order_they_come() -> None:
    loaded, unloaded, again = change("mine", 10, "/one"), change("mine", 20, None), change("mine", 30, "/two")
    for order in itertools.permutations((loaded, unloaded, again)):
        adapters = Adapters("a", Client())
        for each in order:
            adapters.learn(each)
        assert [adapter.request.lora_path for adapter in adapters.all()] == ["/two"]
    adapters = Adapters("a", Client())
    adapters.learn(unloaded)
    adapters.learn(loaded)
    assert "mine" not in adapters


async def test_an_ingress_that_starts_in_the_second_of_a_change_knows_it_soon() -> None:
    """It has asked before the change, and was not there yet to be told of it."""

    async def tell_nobody(_: AdapterChange) -> None:
        pass

    here, late = catalog(tell_nobody, "a"), catalog(tell_nobody, "a")
    await here.load_adapter(LoadAdapterRequest(lora_name="old", lora_path="/old"))
    late.learn(here.adapters())
    await here.unload_adapter(UnloadAdapterRequest(lora_name="old"))
    await here.load_adapter(LoadAdapterRequest(lora_name="new", lora_path="/new"))
    assert late.of("old").adapters.find("old") is not None

    async def ask() -> list[AdapterChange]:
        return here.adapters()

    class Enough(Exception):
        pass

    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 2:
            raise Enough

    with pytest.raises(Enough):
        await keep_learning(late, ask, sleep)
    assert [name for name in ("old", "new") if name in late.of(None).adapters] == ["new"]
    assert waited == [ASK_AGAIN_S] * 3


async def test_what_was_unloaded_stays_so_in_an_ingress_that_loads_it_by_its_settings() -> None:
    async def tell(_: AdapterChange) -> None:
        pass

    here, late = catalog(tell, "a"), catalog(tell, "a")
    for each in (here, late):
        await each.of("a").adapters.load_all({"mine": "/mine"})
    await here.unload_adapter(UnloadAdapterRequest(lora_name="mine"))
    late.learn(here.adapters())
    assert "mine" not in late.of("a").adapters
    catalog(tell, "b").learn(here.adapters())  # in an update to another model: nothing to it


def test_names_that_mean_nothing_any_more_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.service.adapters.MAX_UNLOADED", 3)
    adapters = Adapters("a", Client())
    adapters.learn(change("kept", 1, "/kept"))
    for at in range(2, 10):
        adapters.learn(change(f"gone {at}", at, None))
    assert [known.name for known in adapters.changes()] == ["kept", "gone 7", "gone 8", "gone 9"]
