"""What the pages on structured output and tools show is run as it stands there, but for the server's address."""

import asyncio
import json
import re
from typing import Any

import jsonschema

from engine.config import EngineConfig
from engine.engine import Engine
from engine.hub import resolve_model
from engine.text.tokenizer import load_tokenizer
from tests.app.harness import running
from tests.live_server import REPOSITORY

MODEL = "smollm2-135m"
SMALL: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 26, "num_threads": 1}


async def printed(page: str) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """-> what the page's examples print, and their names."""
    code = "\n".join(re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / page).read_text(), re.DOTALL))
    code = code.replace(f'"model": "{MODEL}"', '"model": "tiny"').replace(f'LLM("{MODEL}")', f'LLM("{MODEL}", **SMALL)')
    shown: list[tuple[Any, ...]] = []
    names: dict[str, Any] = {"print": lambda *given: shown.append(given), "SMALL": SMALL}
    engine = Engine.from_config(EngineConfig(model=MODEL, **SMALL))
    async with running(engine, load_tokenizer(resolve_model(MODEL))) as server:
        await asyncio.to_thread(exec, code.replace("http://127.0.0.1:8000", server.url), names)
    return shown, names


async def test_each_form_of_output_is_held_as_the_page_asks_for_it() -> None:
    shown, names = await printed("structured-output.md")
    texts = [text for (text,) in shown]
    for i in (0, 2, 9):
        jsonschema.validate(json.loads(texts[i]), names["city"])
    assert all(isinstance(json.loads(texts[i]), dict) for i in (1, 3))
    assert re.fullmatch(r"(19|20)\d\d", texts[4])
    assert {texts[5], texts[8], texts[10]} <= {"red", "green", "blue"}
    assert re.fullmatch(r"\d+( \+ \d+){1,4}", texts[6])
    assert texts[7] in ("yes", "no")
    assert len(texts) == 11


async def test_tools_are_called_as_the_page_demands_it() -> None:
    (reason, name, arguments), (answer,), (of_the_named,) = (await printed("tools.md"))[0]
    assert (reason, name) == ("tool_calls", "get_weather")
    assert arguments.keys() == of_the_named.keys() == {"city", "unit"}
    assert answer
