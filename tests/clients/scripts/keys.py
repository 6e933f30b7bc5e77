"""API keys as the SDKs send them: OpenAI's as a bearer, Anthropic's in a header of its own."""

import os

import told
from anthropic import Anthropic
from openai import OpenAI
from told import MODEL

KEY = os.environ["CLIENTS_KEY"]
ASKED = [{"role": "user", "content": "Hello!"}]


def by_openai(key: str, name: str) -> str:
    client = OpenAI(base_url=f"{told.URL}/v1", api_key=key, max_retries=0)
    client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=1, extra_headers={"X-Request-Id": name}
    )
    return name


def by_anthropic(key: str, name: str) -> str:
    client = Anthropic(base_url=told.URL, api_key=key, max_retries=0)
    client.messages.create(model=MODEL, messages=ASKED, max_tokens=1, extra_headers={"X-Request-Id": name})
    return name


told.main(
    {
        "openai": lambda: by_openai(KEY, "openai-known"),
        "anthropic": lambda: by_anthropic(KEY, "anthropic-known"),
        "stranger": lambda: by_anthropic("not-a-key", "anthropic-stranger"),
    }
)
