"""Settings that change under a running application."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.admission import Admission, Budget
from app.failover import FailoverClient
from app.ingress import change_live, doors
from app.settings import LIVE, AppSettings, load_settings, with_live
from engine.errors import ConfigError
from tests.app.conftest import Serve
from tests.app.harness import until
from tests.app.http.test_doors import ask
from tests.app.http.test_http import error_of
from tests.app.http.test_lifecycle import Gate


def services(settings: AppSettings) -> list[Any]:
    """As much of them as can change."""
    return [
        SimpleNamespace(
            admission=Admission(Budget(1), each.max_queue_size),
            client=FailoverClient(cast(Any, None), each.max_resubmissions),
        )
        for each in settings.each
    ]


def test_each_model_and_the_door_go_by_the_new_values() -> None:
    settings = load_settings(
        {"models": [{"served_model_name": "a"}, {"served_model_name": "b", "max_queue_size": 7}]}, {}
    )
    found, door = services(settings), doors(settings)
    assert [service.admission.max_waiting for service in found] == [256, 7]
    change_live(settings, {"max_queue_size": 9, "max_resubmissions": 5, "max_requests_per_key": 3}, found, door)
    assert [(service.admission.max_waiting, service.client.max_tries) for service in found] == [(9, 5)] * 2
    assert door.keys.max_requests == 3
    change_live(settings, {"max_resubmissions": 0}, found, door)
    assert [(service.admission.max_waiting, service.client.max_tries) for service in found] == [(256, 0), (7, 0)]
    assert door.keys.max_requests == 256, "what is taken back is as it was"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 4}, f"max_num_seqs cannot change while it runs; {', '.join(LIVE)} can"),
        ({1: 2, "bogus": 3}, "settings have names, got 1"),
        ({"max_queue_size": -1}, "max_queue_size: input should be greater than or equal to 0, got -1"),
        ({"max_queue_size": 1, "api_keys_file": "/none"}, "api_keys_file: /none cannot be read"),
        ({"api_keys_file": "{keys}"}, "with keys or without is decided at the start"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    if changes.get("api_keys_file") == "{keys}":
        (tmp_path / "keys").write_text("sk-a\n")
        changes = {"api_keys_file": str(tmp_path / "keys")}
    settings = load_settings({}, {})
    found, door = services(settings), doors(settings)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        change_live(settings, changes, found, door)
    assert found[0].admission.max_waiting == 256
    assert not door.keys.any


def test_what_does_not_change_stays_as_it_was_given() -> None:
    settings = load_settings({"max_queue_size": 5, "max_num_seqs": 3, "api_keys": ["sk-a"]}, {})
    live = with_live(settings, {"max_resubmissions": 1})
    assert live.model_dump() == settings.model_dump() | {"max_resubmissions": 1}


async def test_keys_change_under_requests_that_run(scripted: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old\nsk-both\n")
    settings = load_settings({"api_keys_file": str(file)}, {})
    door, gate = doors(settings), Gate()
    async with scripted(before_step=gate, doors=door) as server:
        gate.open.clear()
        running = [asyncio.ensure_future(ask(server, key)) for key in ("sk-old", "sk-both")]
        await until(lambda: server.admission.outstanding == 2, 2)
        file.write_text("sk-new\nsk-both\n")
        change_live(settings, {"max_requests_per_key": 1}, services(settings), door)
        error_of(await ask(server, "sk-old"), 401)
        error_of(await ask(server, "sk-both"), 429)
        gate.open.set()
        assert [answer.status_code for answer in await asyncio.gather(*running)] == [200] * 2
        for key in ("sk-new", "sk-both"):
            assert (await ask(server, key)).status_code == 200
