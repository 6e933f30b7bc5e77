"""What the documents say exists: commands, flags, make targets, links, keys and their defaults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from sumibi.cli import app
from sumibi.stack import POLICIES, Stack, known_keys, load_stack

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

ROOT_COMMAND = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(page: Path) -> list[list[str]]:
    """The words of every `sumibi ...` command: in shell blocks, and in backticks."""
    text = page.read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", text)
    stripped = [re.sub(r"  +#.*", "", line).strip().removeprefix(".venv/bin/") for line in lines]
    return [line.split()[1:] for line in stripped if re.match(r"sumibi [a-z-]", line)]


@by_page
def test_every_command_and_flag_exists(page):
    for words in commands(page):
        command, names = ROOT_COMMAND, list(words)
        while names and hasattr(command, "commands"):
            if names[0].startswith("-"):
                break
            assert names[0] in command.commands, f"sumibi {' '.join(words)}"
            command = command.commands[names.pop(0)]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {word.split("=")[0] for word in names if word.startswith("--")} <= known, words


@by_page
def test_every_make_target_exists(page):
    named = re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    assert set(named) <= TARGETS


@by_page
def test_every_link_leads_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_stack_page_lists_every_key_with_its_default_and_meaning():
    page = (ROOT / "docs/stack-file.md").read_text()
    rows = {
        k: (d, m) for k, d, m in re.findall(r"^\| `([a-z_.]+)` \| `(.*?)` \| (.*) \|$", page, re.MULTILINE)
    }
    keys = {key: text for key, text in known_keys().items() if "*" not in key}
    leaves = {key: text for key, text in keys.items() if not any(k.startswith(f"{key}.") for k in keys)}
    assert {key: meaning.replace("`", "") for key, (_, meaning) in rows.items()} == {
        key: text.replace("`", "") for key, text in leaves.items()
    }
    default = Stack().model_dump()
    for key, (shown, _) in rows.items():
        value = default
        for part in key.split("."):
            value = value[part]
        assert yaml.safe_load(shown) == value, key


def test_the_example_stack_file_is_valid(tmp_path):
    page = (ROOT / "docs/stack-file.md").read_text()
    file = tmp_path / "stack.yaml"
    file.write_text(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])
    assert load_stack(file) == Stack()


def test_the_policies_page_lists_every_policy_once():
    page = (ROOT / "docs/policies.md").read_text()
    assert tuple(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)) == POLICIES


def test_every_decision_is_listed():
    folder = ROOT / "docs/decisions"
    listed = set(re.findall(r"\((\d{4}-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text()))
    assert listed == {page.name for page in folder.glob("0*.md")}


def test_the_newcomer_script_finds_the_commands_of_the_readme():
    code = (
        "import sys; sys.path.insert(0, 'scripts'); import newcomer;"
        "print('\\n'.join(newcomer.readme_commands(open('README.md').read())))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = found.stdout.splitlines()
    assert lines[0] == "make up"
    assert lines[1].startswith("curl --fail-with-body http://127.0.0.1:8000/v1/chat/completions")
    assert lines[2:] == [".venv/bin/sumibi status", "make demo", "make down", "make test"]
