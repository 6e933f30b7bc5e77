"""What the documents say exists: commands, flags, make targets, links, keys and their defaults."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
import typer.main
import yaml

from sumibi.bench.grid import ROWS
from sumibi.bench.workloads import GENERATORS
from sumibi.cli import app
from sumibi.core.latency import LatencyModel
from sumibi.sim.fleet import Fault, FleetSpec, Group
from sumibi.sim.fleet import load as load_fleet
from sumibi.stack import POLICIES, Stack, known_keys, load_stack

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

ROOT_COMMAND = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


VLLM_FLAGS = {
    "--block-size",
    "--chat-template",
    "--enable-scale-out",
    "--enable-prompt-tokens-details",
    "--kv-events-config",
    "--kv-transfer-config",
    "--shutdown-timeout",
}
"""What pages name by itself and mean to be given to vLLM."""


def lines_of(page: Path) -> list[str]:
    """Every line of a shell block, continued ones joined, without prompts and remarks."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"  +#.*", "", line).strip().removeprefix(".venv/bin/") for line in lines]


def spans_of(page: Path) -> list[str]:
    """Everything in backticks outside blocks, also what goes on in the next line."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def commands(lines: list[str]) -> list[list[str]]:
    """The words of every `sumibi ...` command."""
    return [line.split()[1:] for line in lines if re.match(r"sumibi [a-z-]", line)]


def flags(words: list[str]) -> set[str]:
    return {word.split("=")[0].rstrip(",.;:)") for word in words if word.startswith("--")}


def known_flags(command) -> set[str]:
    options = [parameter.opts + parameter.secondary_opts for parameter in command.params]
    return {option for both in options for option in both} | {"--help"}


def every_command(command=ROOT_COMMAND):
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from every_command(inner)


def commands_in(words: list[str]) -> list:
    """The command that the words name, and those above it."""
    found = [ROOT_COMMAND]
    for word in words:
        if word.startswith("-") or not hasattr(found[-1], "commands"):
            break
        assert word in found[-1].commands, f"sumibi {' '.join(words)}"
        found.append(found[-1].commands[word])
    return found


def check_command(words: list[str]) -> None:
    """The verb is there, and takes these flags."""
    assert flags(words) <= known_flags(commands_in(words)[-1]), words


@by_page
def test_every_command_and_flag_exists(page):
    for words in commands(lines_of(page) + spans_of(page)):
        check_command(words)


def test_every_command_and_flag_in_a_help_text_exists():
    helps = [command.help or "" for command in every_command()]
    helps += [getattr(p, "help", "") or "" for command in every_command() for p in command.params]
    lines = [line.strip() for text in helps for line in text.splitlines()]
    found = commands([re.split(r"  +", line)[0] for line in lines])
    found += commands([span for text in helps for span in re.findall(r"`([^`]+)`", text)])
    assert ["up", "--port", "9000", "--policy", "round-robin"] in found
    for words in found:
        check_command(words)


@pytest.fixture(scope="module")
def benchmark_flags() -> dict[str, set[str]]:
    """Every benchmark -> flags that its own help lists."""
    names = sorted(
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for file in (ROOT / "benchmarks").rglob("*.py")
        if re.search(r"argparse|parser\(", text := file.read_text()) and "def main(" in text
    )
    shown = {}
    for name in names:
        asked = [sys.executable, "-m", name, "--help"]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
        shown[name] = set(re.findall(r"(?<![\w-])--[a-z-]+", done.stdout))
    return shown


def test_every_benchmark_and_flag_of_one_exists(benchmark_flags):
    assert {"benchmarks.decide", "benchmarks.simulator.live"} <= benchmark_flags.keys()
    lines = [line for page in PAGES for line in lines_of(page) + spans_of(page)]
    lines += (ROOT / "Makefile").read_text().splitlines()
    for name, rest in re.findall(r"-m (benchmarks[\w.]*)(.*)", "\n".join(lines)):
        assert name in benchmark_flags
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", rest)) <= benchmark_flags[name], rest


def test_a_flag_named_by_itself_is_one_of_a_command_on_its_page(benchmark_flags):
    excused = set()
    for page in PAGES:
        spans = spans_of(page)
        mine = [command for words in commands(lines_of(page) + spans) for command in commands_in(words)]
        of_page = set().union(*map(known_flags, mine))
        of_page |= set().union(*(benchmark_flags[n] for n in benchmark_flags if n in page.read_text()))
        alone = flags([word for span in spans if span.startswith("--") for word in span.split()])
        assert alone <= of_page | VLLM_FLAGS, page
        excused |= alone - of_page
    assert excused == VLLM_FLAGS


def test_every_variable_of_make_exists():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for line in lines_of(page) + spans_of(page):
            if line.startswith("make "):
                for name in re.findall(r" ([A-Z_]+)=", line):
                    assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), line


@by_page
def test_every_path_and_metric_exists(page):
    source = "".join(file.read_text() for file in (ROOT / "src/sumibi/gateway").glob("*.py"))
    for span in spans_of(page):
        if re.fullmatch(r"(src|docs|tests|benchmarks|scripts)(/[\w./-]+)?", span):
            assert (ROOT / span).exists(), span
        if re.fullmatch(r"(sumibi|llm_d_epp)_[a-z_]+\*?", span):
            assert span.rstrip("*") in source, span
        if re.fullmatch(r"(gateway|engines)\.[a-z_.]+[a-z]", span):
            assert span in known_keys() or span.endswith(".log"), span


def test_the_benchmark_s_page_and_help_list_every_row_once():
    page = (ROOT / "docs/bench-routing.md").read_text()
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", page, re.MULTILINE) == [*ROWS, "program"]
    assert f"Rows: {', '.join([*ROWS, 'program'])}." in help_of("bench", "routing", "only")


def test_the_page_and_help_of_replay_list_every_made_up_workload():
    (row,) = re.findall(r"^\| made-up \| (.*) \|$", (ROOT / "docs/replay.md").read_text(), re.MULTILINE)
    assert re.findall(r"`([a-z0-9]+)`", row) == [*GENERATORS]
    assert f"made-up: {', '.join(GENERATORS)}, " in help_of("replay", "trace")


def help_of(*path: str) -> str:
    *verbs, parameter = path
    command = ROOT_COMMAND
    for verb in verbs:
        command = command.commands[verb]
    return next(p.help for p in command.params if p.name == parameter)


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


@by_page
def test_every_part_of_a_stack_file_or_fleet_is_valid(page, tmp_path):
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    for number, text in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        content = yaml.safe_load(text)
        if "static_resources" not in content:  # Envoy's, which tests/envoy tries
            load_fleet(file) if "groups" in content else load_stack(file)


def test_the_fleet_in_the_help_of_replay_is_valid(tmp_path):
    text = ROOT_COMMAND.commands["replay"].help.partition("A fleet file:\n")[2]
    (tmp_path / "fleet.yaml").write_text(text)
    assert load_fleet(tmp_path / "fleet.yaml").replicas == 4


def test_the_page_of_replay_names_fields_of_fleets_with_their_defaults():
    page = (ROOT / "docs/replay.md").read_text()
    for head, of in (("a group", Group), ("the fleet", FleetSpec)):
        known = {field.name: field.default for field in msgspec.structs.fields(of)}
        table = page.partition(f"| field of {head} |")[2].partition("\n\n")[0]
        rows = [row.split("|") for row in table.splitlines()[2:]]
        listed = [name for row in rows for name in re.findall(r"`(\w+)`", row[1])]
        assert sorted(listed) == sorted(known)
        for _, named, _, default, _ in rows:
            names = re.findall(r"`(\w+)`", named)
            shown = default.strip().replace("`", "").split(", ")
            if len(shown) == len(names) and shown != [""]:
                for name, text in zip(names, shown, strict=True):
                    assert as_shown(known[name]) in (text.replace("never", "none"), ""), name


def as_shown(default: object) -> str:
    """How a page writes it; empty: there is none, or an empty list."""
    if default is msgspec.NODEFAULT:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default or "none")


def test_the_page_of_replay_names_what_faults_and_speeds_are_made_of():
    page = (ROOT / "docs/replay.md").read_text()
    faults = page.partition("### What goes wrong")[2].partition("###")[0]
    kinds = get_type_hints(Fault)["kind"].__args__
    assert tuple(re.findall(r"^\| `([a-z-]+)` \|", faults.partition("| `kind`")[2], re.MULTILINE)) == kinds
    assert set(Fault.__struct_fields__) <= set(re.findall(r"`(\w+)`", faults))
    speeds = page.partition("### Speeds")[2].partition("###")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", speeds, re.MULTILINE)) == LatencyModel.__struct_fields__


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
