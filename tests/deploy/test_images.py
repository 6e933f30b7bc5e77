"""Containerfiles by a linter and by what they promise; `scripts/images.sh` with builders that take notes."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from manifests import DEPLOY, ROOT

from sumibi import __version__

FILES = sorted(DEPLOY.glob("Containerfile*"))
HADOLINT = Path(sys.executable).with_name("hadolint")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
by_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines joined."""
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def last_stage(file: Path) -> list[tuple[str, str]]:
    words = instructions(file)
    return words[max(n for n, (word, _) in enumerate(words) if word == "FROM") :]


@by_file
def test_the_linter_has_nothing_to_say(file):
    done = subprocess.run(
        [HADOLINT, "--no-color", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_would_see_something(tmp_path):
    bad = tmp_path / "Containerfile"
    bad.write_text("FROM python:latest\nRUN sudo pip install x\n")
    done = subprocess.run(
        [HADOLINT, "--no-color", bad], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode
    assert "DL3007" in done.stdout


@by_file
def test_what_runs_is_nobody_and_starts_the_command_line(file):
    stage = last_stage(file)
    words = dict(stage)
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", words["USER"])  # a number: runAsNonRoot cannot check names
    assert words["ENTRYPOINT"] == '["sumibi"]'  # no shell between, which would keep SIGTERM to itself
    assert "-slim-" in words["FROM"]
    assert "PYTHONDONTWRITEBYTECODE=1" in words["ENV"]


@by_file
def test_nothing_is_installed_in_the_last_stage(file):
    for word, rest in last_stage(file):
        assert not re.search(r"\b(apt-get|pip|gcc|curl|wget)\b", rest), f"{word} {rest}"


@by_file
def test_versions_are_those_of_the_project(file):
    """What is installed by name with an exact version is what pyproject.toml says."""
    extras = [want for wants in PROJECT["optional-dependencies"].values() for want in wants]
    named = [
        word.strip("'\"")
        for _, rest in instructions(file)
        for word in rest.split()
        if re.search("[=>]=", word)
    ]
    wanted = [word for word in named if not word.startswith("--")]
    assert wanted
    assert set(wanted) <= set(extras)


@by_file
def test_only_what_is_there_and_let_through_is_copied(file):
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for word, rest in instructions(file):
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source in let_through


@pytest.fixture
def images(tmp_path):
    """Runs the script where only the given builders are: (exit code, standard error, what they were told)."""
    told = tmp_path / "told"

    def run(*builders: str, docker_daemon: bool = True, **variables: str):
        tools = tmp_path / "bin"
        tools.mkdir()
        for name in ("dirname", "sed", "sh", "env"):
            (tools / name).symlink_to(
                f"/usr/bin/{name}" if Path(f"/usr/bin/{name}").exists() else f"/bin/{name}"
            )
        for name in builders:
            stub = tools / name
            stub.write_text(
                f'#!/bin/sh\nif [ "$1" = info ]; then exit {0 if docker_daemon else 1}; fi\n'
                f'echo "{name} $*" >>{told}\n'
            )
            stub.chmod(0o755)
        done = subprocess.run(
            [ROOT / "scripts" / "images.sh"],
            env={"PATH": str(tools), **variables},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, done.stderr, told.read_text().splitlines() if told.exists() else []

    return run


def test_both_images_are_built(images):
    code, _, told = images("podman", "docker")
    assert code == 0
    assert told == [
        f"podman build --file deploy/Containerfile --tag sumibi:{__version__} --build-arg COMPILED=0 .",
        f"podman build --file deploy/Containerfile.engine --tag sumibi-engine:{__version__}"
        " --build-arg TORCH_INDEX= .",
    ]


def test_names_and_versions_can_be_said(images):
    _, _, told = images(
        "buildah", REGISTRY="registry.example.com/me", TAG="t", COMPILED="1", TORCH_INDEX="url"
    )
    assert told[0].endswith("--tag registry.example.com/me/sumibi:t --build-arg COMPILED=1 .")
    assert told[1].endswith("--build-arg TORCH_INDEX=url .")


def test_no_builder(images):
    code, error, told = images()
    assert (code, told) == (3, [])
    assert "apt-get install" in error


def test_docker_without_its_daemon_is_none(images):
    code, error, told = images("docker", docker_daemon=False)
    assert (code, told) == (3, [])
    assert "daemon" in error


def test_the_builder_that_was_asked_for(images):
    _, _, told = images("podman", "docker", BUILDER="docker")
    assert all(line.startswith("docker build") for line in told)


def test_a_builder_that_is_asked_for_and_not_there(images):
    code, error, _ = images("podman", BUILDER="buildah")
    assert code == 3
    assert "BUILDER=buildah" in error
