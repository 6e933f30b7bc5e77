"""The front door: help, messages, exit codes. Commands run in this process where nothing is started."""

import os
import subprocess
import sys

import pytest

from sumibi import __version__
from sumibi.cli import main

VERBS = [
    "up",
    "down",
    "demo",
    "serve",
    "engine",
    "status",
    "doctor",
    "replay",
    "bench",
    "bench routing",
    "bench claims",
    "decisions rerun",
    "models fetch",
    "keys check",
]


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SUMIBI_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_every_verb_explains_itself(verb, capsys):
    assert main([*verb.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Usage:" in out
    assert "\\b" not in out  # click's mark for "keep these lines", when it is not understood


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sumibi {__version__}\n"


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb):
    code = (
        "import sys; from sumibi.cli import main; main(sys.argv[1:]);"
        "print(sorted({'torch', 'rich', 'numpy', 'zmq', 'uvloop', 'asyncio', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *verb.split(), "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "safetensors", "gguf", "starlette", "uvicorn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from sumibi.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status"], "no stack is running"),
        (["doctor"], "torch"),
        (["decisions", "rerun", "nowhere.jsonl"], "nowhere.jsonl"),
        (["demo"], "pip install 'sumibi[engine]'"),
    ],
)
def test_an_installation_without_an_engine_has_the_rest(words, said, tmp_path):
    """`pip install sumibi`, and the gateway's image: no torch, no numpy."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *words],
        env={**os.environ, **dict.fromkeys(("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"), str(tmp_path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "This is a bug" not in done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["up", "--stack", "nowhere.yaml"], 2, "cannot read the stack file nowhere.yaml"),
        (["up", "--policy", "nearest"], 2, "command line: gateway.policy is 'nearest'"),
        (["up", "--engines", "0"], 2, "command line: engines.count is 0"),
        (["up", "--engines", "two"], 2, "--engines"),
        (["up", "--model", "/nowhere/model"], 3, "/nowhere/model"),
        (["up", "--model", "smollm2-135m-instrct"], 3, "did you mean smollm2-135m-instruct?"),
        (["up", "--model", "."], 3, "is no checkpoint directory: it has no config.json"),
        (["serve", "--engine", "ftp://x"], 2, "--engine 'ftp://x': want http://HOST:PORT"),
        (["serve"], 2, "--engine"),
        (["serve", "--engine", "http://a", "--band", "1"], 2, "--band '1': want PRIORITY:max_requests=N"),
        (["serve", "--engine", "http://a", "--hold-above", "0"], 2, "--hold-above '0': want seconds"),
        (["engine", "--model", "tiny", "--dtype", "int3"], 2, "--dtype int3 is unknown: use one of auto"),
        (["engine", "--model", "tiny", "--kv-events-config", "{"], 2, "--kv-events-config"),
        (["models", "fetch", "/nowhere/model"], 3, "/nowhere/model"),
        (["decisions", "rerun", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["decisions", "rerun", "garbage.jsonl"], 2, "line 1"),
        (["keys", "check"], 2, "--against"),
        (["keys", "check", "--against", "ftp://x"], 2, "--against 'ftp://x': want http://HOST:PORT"),
        (
            ["keys", "check", "--against", "http://127.0.0.1:9"],
            1,
            "no answer from http://127.0.0.1:9/v1/models",
        ),
        (["fly"], 2, "No such command 'fly'"),
    ],
)
def test_a_mistake_is_explained_on_stderr_with_its_exit_code(words, code, said, capsys, tmp_path):
    (tmp_path / "garbage.jsonl").write_text("garbage\n")
    assert main(words) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_typo_in_a_stack_file_in_this_directory_is_explained(tmp_path, capsys):
    (tmp_path / "stack.yaml").write_text("engines:\n  kv_block: 4\n")
    assert main(["up"]) == 2
    assert "stack.yaml, line 2: unknown key 'engines.kv_block'; did you mean 'engines.kv_blocks'?" in (
        capsys.readouterr().err
    )


def test_an_unexpected_error_is_called_a_bug_and_hides_its_traceback(monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/x")

    def boom() -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("sumibi.cli.machine._state_dir", boom)
    assert main(["down"]) == 1
    assert "unexpected ZeroDivisionError: boom\nThis is a bug" in capsys.readouterr().err
    monkeypatch.setenv("SUMIBI_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["down"])


def test_down_without_a_stack_says_so(capsys):
    assert main(["down"]) == 0
    assert capsys.readouterr().out == "no stack is running\n"
