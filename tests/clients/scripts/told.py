"""What the scripts of all clients share: what to ask, and how to tell what came of it.

A script runs in the clients' own environment, asks the gateway through one client and writes what it saw as
JSON; what that ought to be is for the tests to say. Nothing of sumibi is imported here.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ["CLIENTS_GATEWAY_URL"]
"""Without `/v1`."""
MODEL = os.environ["CLIENTS_MODEL"]
KEY = "a-key"
OUTPUT_TOKENS = 24
ENOUGH_TOKENS = 100
"""For an answer that ends by itself."""

SYSTEM = "You answer in one sentence."
QUESTION = "What is charcoal, and what do people use it for?"
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
"""Every client asks this at temperature 0; all are to get the same text."""

ENDLESS = "Count from one to ten thousand, one number a line."
ENDLESS_TOKENS = 4000
"""More than a minute of this model on the cores of the tests."""

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS},
}
TOOL_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Kyoto"}'},
}
TOOL_HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather in Kyoto?"},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""
IMAGE_PARTS = [
    {"type": "text", "text": "What is this?"},
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
]


def long_system(client: str) -> str:
    """A system prompt of some 400 tokens that no other client sends: it has to be cold at first."""
    rules = " ".join(f"Rule {number}: be brief and say it plainly." for number in range(1, 31))
    return f"You are the assistant of {client}. {rules}"


def answer(text: str | None, finish: str | None, prompt: int, output: int, cached: int) -> dict[str, Any]:
    """One answer in the words of all scripts; tokens of the prompt are all of them, cached or not."""
    return {
        "text": text,
        "finish": finish,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": cached,
    }


def error_of(call: Callable[[], object]) -> dict[str, Any]:
    """The exception that `call` raises, as its caller sees it. Fails if there is none."""
    try:
        call()
    except Exception as error:
        return {
            "classes": [base.__name__ for base in type(error).__mro__],
            "message": str(error),
            "status": getattr(error, "status_code", None),
        }
    raise AssertionError("this should have been refused")


def main(checks: dict[str, Callable[[], object]]) -> None:
    """Make every check and write what each saw to the file that the command line names."""
    seen: dict[str, object] = {}
    for name, check in checks.items():
        try:
            seen[name] = check()
        except Exception:
            seen[name] = {"raised": traceback.format_exc()}
    with open(sys.argv[1], "w") as out:
        json.dump(seen, out)
