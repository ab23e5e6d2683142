"""Tools for models whose chat template knows none: described in the system message, in the Hermes form."""

import json
from typing import Any

Message = dict[str, Any]

_INSTRUCTIONS = """You may call functions to help with the user's request. These are their signatures, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


def with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The messages with `tools` described in the first one, which becomes or is the system's."""
    described = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [first | {"content": f"{first['content']}\n\n{described}"}, *messages[1:]]
    return [{"role": "system", "content": described}, *messages]


def without_tool_turns(messages: list[Message]) -> list[Message]:
    """Calls become the text that makes them, and results a user's turn, several in a row one."""
    plain: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{message['content']}\n</tool_response>")
            continue
        if results:
            plain.append({"role": "user", "content": "\n".join(results)})
            results = []
        calls = message.get("tool_calls")
        if calls:
            written = [
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls
            ]
            text = "\n".join([message["content"], *written] if message["content"] else written)
            message = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
        plain.append(message)
    if results:
        plain.append({"role": "user", "content": "\n".join(results)})
    return plain
