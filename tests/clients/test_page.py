"""The page about clients: every block on it is run, line by line as a person would."""

import os
import re
import subprocess
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
BLOCKS = {
    title: found
    for title, text in SECTIONS.items()
    if (found := re.findall(r"^```(sh|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
}


def test_the_page_has_blocks_for_all_clients():
    named = {"curl", "OpenAI's SDK", "Anthropic's SDK", "litellm", "LangChain", "aiperf", "inference-perf"}
    assert BLOCKS.keys() == named


@pytest.mark.parametrize("title", BLOCKS)
def test_what_the_page_says_can_be_done(title, clients, stack, tmp_path):
    before = stack.requests()
    for language, text in BLOCKS[title]:
        text = text.replace("http://127.0.0.1:8000", stack.url).replace("curl ", "curl -sS --fail ")
        for home in ("~", "$HOME"):
            text = text.replace(f"{home}/.cache/sumibi/models/{stack.model}", str(stack.directory))
        command = ["bash", "-euc", text] if language == "sh" else [clients / "python", "-c", text]
        done = subprocess.run(
            command,
            env={**os.environ, "PATH": f"{clients}:{os.environ['PATH']}", "HOME": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert done.stdout.strip()
    assert stack.requests() >= before + 1
