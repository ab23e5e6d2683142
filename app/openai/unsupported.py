"""Parameters that clients know and this server does not act on: refused, never ignored.

Each has the values that ask for nothing and so are taken.
"""

from collections.abc import Mapping
from typing import Any

from app.openai.errors import ApiError

_COMMON: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "logits_processors": (None, []),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "truncate_prompt_tokens": (None,),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "priority": (None, 0),
}

CHAT: dict[str, tuple[Any, ...]] = _COMMON | {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "echo": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
}

COMPLETIONS: dict[str, tuple[Any, ...]] = _COMMON | {
    "best_of": (None, 1),
    "logprobs": (None,),
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
    "prompt_embeds": (None,),
}


def refuse_unsupported(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise the 400 for the first parameter of `body` that asks for what is not there."""
    for name in table.keys() & body.keys():
        if not any(_same(body[name], neutral) for neutral in table[name]):
            allowed = " or ".join(repr(value) for value in table[name] if value is not None)
            advice = f"leave it out or give {allowed}" if allowed else "leave it out"
            raise ApiError(
                400,
                f"{name} is not supported by this server: {advice} (got {str(body[name])[:80]!r}).",
                param=name,
                code="unsupported_parameter",
            )


def _same(given: Any, neutral: Any) -> bool:
    """Equal, and not 1 for True."""
    return bool(given == neutral) and isinstance(given, bool) == isinstance(neutral, bool)
