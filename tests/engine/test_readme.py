"""The first thing that a reader tries: README's request has the answer that README gives, by the default settings."""

import json
import re
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams

README = (Path(__file__).parents[2] / "README.md").read_text()


def _first_request() -> tuple[dict[str, Any], str]:
    found = re.search(r"-d '(\{.*?\})'\n```\n\nanswers `(.*?)`", README)
    assert found is not None, "README has no request with its answer"
    return json.loads(found[1]), found[2]


def test_the_first_request_has_the_answer_that_the_page_gives() -> None:
    body, answer = _first_request()
    llm = LLM("smollm2-135m", max_model_len=256, kv_cache_memory_bytes=1 << 26)
    params = SamplingParams(temperature=body["temperature"], max_tokens=32, logprobs=2)
    output = llm.chat(body["messages"], params, use_tqdm=False)[0].outputs[0]
    assert output.text == answer
    assert output.logprobs is not None
    best, second = sorted((entry.logprob for entry in output.logprobs[0].values()), reverse=True)[:2]
    assert best - second > 0.05, "a close call: another CPU may round it the other way"
