"""Parameters that clients know and this server does not act on: refused, never ignored.

Each has the values that ask for nothing and so are taken.
"""

import json
from collections.abc import Mapping
from typing import Any

from app.openai.errors import ApiError

_COMMON: dict[str, tuple[Any, ...]] = {
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "use_beam_search": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "truncate_prompt_tokens": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "return_prompt_text": (None, False),
    "vllm_xargs": (None, {}),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
}

CHAT: dict[str, tuple[Any, ...]] = _COMMON | {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "echo": (None, False),
    "add_special_tokens": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "include_reasoning": (None, True),
    "mm_processor_kwargs": (None, {}),
}

COMPLETIONS: dict[str, tuple[Any, ...]] = _COMMON | {
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
    "prompt_embeds": (None,),
}


def refuse_unsupported(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise the 400 for the first parameter of `body` that asks for what is not there."""
    for name in table.keys() & body.keys():
        if not any(_same(body[name], neutral) for neutral in table[name]):
            allowed = " or ".join(json.dumps(value) for value in table[name] if value is not None)
            advice = f"leave it out or give {allowed}" if allowed else "leave it out"
            raise ApiError(
                400,
                f"{name} is not supported by this server: {advice} (got {json.dumps(body[name])[:80]}).",
                param=name,
                code="unsupported_parameter",
            )


def _same(given: Any, neutral: Any) -> bool:
    """Equal, and not 1 for True."""
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)
