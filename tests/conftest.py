"""For every test: no skip goes unnoticed.

A test that needs a part that may be absent names it with a marker (`real_model`). It is skipped only
while that part is absent; any other skip is a failure, so a suite cannot go green by not running.
"""

from collections.abc import Generator
from pathlib import Path

import pytest

from sumibi.core.errors import ModelError
from sumibi.engine import fetch, manifest
from sumibi.routing import router


def _model_is_installed() -> bool:
    try:
        return manifest.check(fetch.models_directory() / fetch.DEFAULT_MODEL)
    except ModelError:
        return False


APART = [Path(__file__).parent / name for name in ("vllm", "clients", "compiled", "envoy")]
"""Tests that take minutes and an environment of their own: with real vLLM servers, with real clients."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave them out unless they are asked for by their path (`make test-vllm`, `make test-clients`)."""
    if collection_path not in APART:
        return None
    named = [Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args]
    return None if any(path.is_relative_to(collection_path) for path in named) else True


TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
"""Recorded traces beside the repository: `weka/sessions.jsonl.xz`, `mooncake/synthetic_trace.jsonl.xz`."""


def _runs_interpreted() -> bool:
    """False under `make test-compiled`."""
    return not str(router.__file__).endswith(".so")


_PARTS = {
    "interpreted": (
        _runs_interpreted,
        "it puts a stand-in, or another constant, where compiled code takes nothing but its own",
    ),
    "real_model": (_model_is_installed, "the converted model is absent: `make setup` makes it"),
    "traces": (TRACES.is_dir, "the recorded traces are absent: they are looked for in ../shared/traces"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an absent part."""
    for name, (is_installed, reason) in _PARTS.items():
        marked = [item for item in items if item.get_closest_marker(name)]
        if marked and not is_installed():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))
                item.stash[_ABSENT] = True


_ABSENT = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip that no absent part explains into a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.stash.get(_ABSENT, False):
        report.outcome = "failed"
        report.longrepr = f"skipped although what it needs is installed: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def traces() -> Path:
    """The directory of recorded traces; tests of it carry `@pytest.mark.traces`."""
    return TRACES


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The converted default model's directory; its tests carry `@pytest.mark.real_model`."""
    return fetch.models_directory() / fetch.DEFAULT_MODEL
