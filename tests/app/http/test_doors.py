"""API keys, requests of one key at once, pages of other origins, and bodies that are too much."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.http.doors import Doors, read_keys
from app.settings import load_settings
from engine.errors import ConfigError
from tests.app.conftest import Serve
from tests.app.harness import Server, until
from tests.app.http.test_http import CHAT, error_of
from tests.app.http.test_lifecycle import Gate

KEYS = ("sk-first", "sk-second")
BODY = {"prompt": "hi", "max_tokens": 2}


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(server: Server, key: str | None, **headers: str) -> httpx.Response:
    return await server.http.post(
        "/v1/completions", json=BODY, headers=headers | (with_key(key) if key is not None else {})
    )


async def test_one_of_the_keys_must_come_with_each_request(scripted: Serve) -> None:
    async with scripted(doors=Doors(KEYS)) as server:
        for key in KEYS:
            assert (await ask(server, key)).status_code == 200
        assert (await ask(server, None, Authorization=f"bearer {KEYS[1]}")).status_code == 200
        for wrong in ("sk-firs", "sk-first2", "sk-first,sk-second", "x" * 5000):
            response = await ask(server, wrong)
            error = error_of(response, 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert wrong not in error["message"]
        error_of(await ask(server, None), 401)
        error_of(await ask(server, None, Authorization=KEYS[0]), 401)
        error_of(await ask(server, None, Authorization=f"Basic {KEYS[0]}"), 401)
        for path in ("/metrics", "/v1/models", "/docs", "/openapi.json", "/version", "/nothing"):
            error_of(await server.http.get(path), 401)
        assert (await server.http.get("/health")).status_code == 200


async def test_a_body_is_not_read_for_one_who_may_not_come_in(scripted: Serve) -> None:
    async with scripted(doors=Doors(KEYS)) as server:
        error_of(await server.http.post(CHAT, content=b"not json"), 401)


async def test_one_key_may_have_so_many_requests_at_once(scripted: Serve) -> None:
    gate = Gate()
    async with scripted(before_step=gate, doors=Doors(KEYS, max_requests_per_key=2)) as server:
        gate.open.clear()
        running = [asyncio.ensure_future(ask(server, KEYS[0])) for _ in range(2)]
        await until(lambda: server.admission.outstanding == 2, 2)
        refused = await ask(server, KEYS[0])
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        other = asyncio.ensure_future(ask(server, KEYS[1]))
        await asyncio.sleep(0.01)
        gate.open.set()
        assert [response.status_code for response in await asyncio.gather(*running, other)] == [200] * 3
        assert (await ask(server, KEYS[0])).status_code == 200


async def test_pages_of_other_origins_are_kept_out_unless_named(scripted: Serve) -> None:
    asking = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with scripted() as server:
        response = await server.http.options(CHAT, headers=asking)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
    async with scripted(doors=Doors(KEYS, allow_origins=["https://a.example"])) as server:
        asking |= {"Access-Control-Request-Headers": "authorization"}
        allowed = await server.http.options(CHAT, headers=asking)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://a.example")
        other = await server.http.options(CHAT, headers=asking | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = await ask(server, None, Origin="https://a.example")
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.example")


def test_keys_are_read_from_settings_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nsk-a\n\n  sk-b  \nsk-a\n")
    assert read_keys(["sk-c"], str(file)) == ["sk-c", "sk-a", "sk-b"]
    assert read_keys([], None) == []
    for text in ("", "# none\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="no key"):
            read_keys([], str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys([], str(tmp_path / "none"))
    with pytest.raises(ConfigError) as caught:
        read_keys(["sk-sécret", "two words"], None)
    assert "cret" not in str(caught.value)


def test_settings_show_no_key() -> None:
    settings = load_settings({}, {"NANOSERVE_API_KEYS": "sk-a, sk-b,"})
    assert [key.get_secret_value() for key in settings.api_keys] == ["sk-a", "sk-b"]
    assert "sk-a" not in f"{settings} {settings!r} {settings.model_dump()}"
    assert len(load_settings({"api_keys": ["sk-a"]}, {}).api_keys) == 1
    assert load_settings({"cors_allow_origins": "https://a, https://b"}, {}).cors_allow_origins == (
        "https://a",
        "https://b",
    )
    assert "sk-" not in repr(Doors(["sk-a"]))
    for wrong in ([""], {"sk-a": 1}, [5], 5):
        with pytest.raises(ConfigError, match="api_keys") as caught:
            load_settings({"api_keys": wrong}, {})
        assert "sk-a" not in str(caught.value)


def test_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load_settings({"api_keys_file": "keys", "chat_template": "t.jinja"}, {})
    assert (settings.api_keys_file, settings.chat_template) == (str(tmp_path / "keys"), str(tmp_path / "t.jinja"))
    assert load_settings({"chat_template": "{{ 1 }}"}, {}).chat_template == "{{ 1 }}"


async def test_keys_are_never_logged(scripted: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with scripted(doors=Doors(KEYS)) as server:
            await ask(server, KEYS[0])
            await ask(server, "sk-wrong")
    ours = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not any("sk-" in message for message in ours)


@pytest.mark.parametrize(
    "content",
    [
        b'{"messages":' * 1000, b"[" * 200_000, b'{"messages":[{"role":"user","content":' + b"[" * 5000, b"\x00",
        b"\xff" * 1000, b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"a"}],"seed":1e400}',
        b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', b'{"messages":' + b"[0," * 50_000,
        b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 5000) + b"]}",
        b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":' + b"[" * 300 + b"]" * 300 + b"}}",
        b'{"messages":[{"role":"user","content":"a"}],"tools":' + b"[{}]" + b"}",
        b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 5000 + b"}",
        b'{"messages":[{"role":"user","content":"a"}],"stop":[' + b",".join([b'"x"'] * 5000) + b"]}",
    ],
    ids=range(14),
)  # fmt: skip
async def test_bodies_that_are_too_much_are_refused_quickly(scripted: Serve, content: bytes) -> None:
    async with scripted() as server:
        response = await asyncio.wait_for(server.http.post(CHAT, content=content), 5)
        message = error_of(response, 400)["message"]
        assert len(message) < 1000
        assert not any(part in message for part in ("Traceback", ".py", "/site-packages"))
        assert (await server.chat(max_tokens=1)).status_code == 200


async def test_a_template_that_loops_is_refused_quickly(scripted: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.prompts.chat_template.MAX_RENDER_S", 0.1)
    loop: Any = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    async with scripted(chat_template=loop) as server:
        assert "did not end" in error_of(await asyncio.wait_for(server.chat(), 5), 400)["message"]
        assert (await server.complete(max_tokens=1)).status_code == 200
