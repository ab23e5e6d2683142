"""A client that leaves while the step that ends its request is being computed."""

import asyncio

import pytest

from tests.app.conftest import Serve
from tests.app.harness import until
from tests.app.http.test_lifecycle import COMPLETIONS, Connection, Gate


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ["hello there", [5, 2]], ids=["by length", "by EOS"])
async def test_leaving_at_the_finishing_step_frees_everything(scripted: Serve, stream: bool, script: str) -> None:
    gate = Gate()
    async with scripted(script, before_step=gate) as server:
        gate.open.clear()
        connection = await Connection.post(
            server, COMPLETIONS, {"prompt": "hello", "max_tokens": 1 if script != [5, 2] else 9, "stream": stream}
        )
        await until(lambda: server.admission.outstanding == 1, 5)
        if script == [5, 2]:  # let the first step go, stop at the one that makes the EOS
            gate.open.set()
            await until(lambda: gate.steps >= 1, 5)
            gate.open.clear()
        connection.leave()
        await asyncio.sleep(0.05)
        gate.open.set()
        await server.idle()
        assert (await server.complete(max_tokens=1)).status_code == 200
