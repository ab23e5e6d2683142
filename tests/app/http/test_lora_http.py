"""Adapters through the application: chosen by name, several in one batch, loaded and unloaded while it runs."""

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests import reference
from tests.app.harness import until
from tests.tiny_adapters import merge, write_adapter

PROMPT = list(range(40, 90))
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(folder / "one", model_dir, seed=3),
        "two": write_adapter(folder / "two", model_dir, seed=5, targets=("q_proj", "up_proj"), rank=4),
    }


@pytest.fixture(scope="module")
def expected(model_dir: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the base and each merged model make of the prompt."""
    folder = tmp_path_factory.mktemp("merged")
    merged = {name: merge(folder / name, model_dir, path) for name, path in adapters.items()}
    return {name: reference.greedy(path, PROMPT, NUM_TOKENS) for name, path in {"tiny": model_dir, **merged}.items()}


def body(model: str | None, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    } | more  # fmt: skip


async def test_two_adapters_and_the_base_in_one_batch_each_equal_to_its_merged_model(real, adapters, expected):
    modules = {name: str(path) for name, path in adapters.items()}
    async with real(enable_lora=True, lora_modules=modules) as server:
        for _ in range(2):  # the second time out of the prefix cache
            names = ["tiny", "one", "two", "one"]
            answers = await asyncio.gather(*(server.http.post("/v1/completions", json=body(name)) for name in names))
            for name, answer in zip(names, answers, strict=True):
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == expected[name], name
                assert answer.json()["model"] == name
        stats = await server.idle()
        assert stats.steps < 2 * len(names) * NUM_TOKENS  # not one after another, however late some came in
        assert stats.adapter_loads == 2
        assert stats.cached_prompt_tokens >= 4 * 48
        streamed = await server.stream_complete(**body("two"))
        ids = [token for chunk in streamed.chunks for c in chunk["choices"] for token in c.get("token_ids", ())]
        assert ids == expected["two"]
        chat = await server.chat("hello", model="one", max_tokens=3)
        assert chat.json()["model"] == "one"


async def test_adapters_are_listed_beside_their_model(real, adapters):
    async with real(enable_lora=True, lora_modules={"one": str(adapters["one"])}) as server:
        base, one = (await server.http.get("/v1/models")).json()["data"]
        assert (base["id"], base["parent"]) == ("tiny", None)
        assert (one["id"], one["parent"], one["root"]) == ("one", "tiny", str(adapters["one"]))
        assert (await server.http.get("/v1/models/one")).json() == one
        missing = await server.complete(model="three")
        assert missing.status_code == 404
        assert "'tiny', 'one'" in missing.json()["error"]["message"]
        tokens = await server.http.post("/tokenize", json={"model": "one", "prompt": "hello"})
        assert tokens.status_code == 200


async def test_an_adapter_comes_and_goes_while_the_server_runs(real, adapters, expected, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["one"], folder)
    async with real(enable_lora=True, max_loras=1, allow_updates=True) as server:
        load = {"lora_name": "mine", "lora_path": str(folder)}
        answer = await server.http.post("/v1/load_lora_adapter", json=load)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
        first = await server.http.post("/v1/completions", json=body("mine"))
        assert first.json()["choices"][0]["token_ids"] == expected["one"]

        again = await server.http.post("/v1/load_lora_adapter", json=load)
        assert again.status_code == 400
        assert "has already been loaded" in again.json()["error"]["message"]
        for file in adapters["two"].iterdir():
            shutil.copyfile(file, folder / file.name)
        answer = await server.http.post("/v1/load_lora_adapter", json=load | {"load_inplace": True})
        assert answer.status_code == 200
        second = await server.http.post("/v1/completions", json=body("mine"))
        assert second.json()["choices"][0]["token_ids"] == expected["two"]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

        answer = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
        assert (await server.http.post("/v1/completions", json=body("mine"))).status_code == 404
        answer = await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert answer.status_code == 404
        assert "cannot be found" in answer.json()["error"]["message"]


async def test_an_adapter_that_was_unloaded_is_kept_by_those_that_run_with_it(real, adapters, expected):
    async with real(enable_lora=True, allow_updates=True) as server:
        load = {"lora_name": "mine", "lora_path": str(adapters["one"])}
        await server.http.post("/v1/load_lora_adapter", json=load)
        launch, launched, unloaded = server.engine.runner.launch, [], threading.Event()

        def launch_the_second_after_unloading(plan):
            launched.append(plan)
            assert len(launched) == 1 or unloaded.wait(10)
            return launch(plan)

        server.engine.runner.launch = launch_the_second_after_unloading
        running = asyncio.ensure_future(server.http.post("/v1/completions", json=body("mine")))
        await until(lambda: len(launched) > 1, 5)
        await server.http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        unloaded.set()
        assert (await running).json()["choices"][0]["token_ids"] == expected["one"]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"lora_path": "/nowhere"}, 404, "No adapter found: '/nowhere' is no folder"),
        ({"lora_name": "tiny"}, 400, "'tiny' is that of a model"),
        ({"lora_path": None}, 400, "lora_path"),
        ({"lora_name": ""}, 400, "lora_name"),
    ],
)
async def test_what_cannot_be_loaded_is_told(real, adapters, change, status, message):
    async with real(enable_lora=True, allow_updates=True) as server:
        load = {"lora_name": "mine", "lora_path": str(adapters["one"])} | change
        answer = await server.http.post("/v1/load_lora_adapter", json=load)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]
        assert len((await server.http.get("/v1/models")).json()["data"]) == 1


async def test_a_pickle_is_refused(real, adapters, tmp_path):
    shutil.copytree(adapters["one"], tmp_path / "a")
    (tmp_path / "a/adapter_model.safetensors").rename(tmp_path / "a/adapter_model.bin")
    async with real(enable_lora=True, allow_updates=True) as server:
        load = {"lora_name": "mine", "lora_path": str(tmp_path / "a")}
        answer = await server.http.post("/v1/load_lora_adapter", json=load)
        assert answer.status_code == 400
        assert "pickle" in answer.json()["error"]["message"]


async def test_updates_are_refused_where_they_are_not_allowed(real, adapters):
    async with real(enable_lora=True) as server:
        for path in ("load", "unload"):
            load = {"lora_name": "mine", "lora_path": str(adapters["one"])}
            answer = await server.http.post(f"/v1/{path}_lora_adapter", json=load)
            assert answer.status_code == 404
            assert "allow_runtime_lora_updating" in answer.json()["error"]["message"]


async def test_files_that_changed_since_they_were_loaded_are_not_served_under_the_old_name(real, adapters, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(adapters["one"], folder)
    async with real(
        enable_lora=True, max_loras=1, lora_modules={"mine": str(folder), "two": str(adapters["two"])}
    ) as s:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
        answer = await s.http.post("/v1/completions", json=body("mine"))  # the host has kept the other one alone
        assert answer.status_code == 400
        assert "are not those that were loaded as 'mine'" in answer.json()["error"]["message"]
