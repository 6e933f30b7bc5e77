"""A whole stack on the tiny model, driven by the command line."""

from collections.abc import Callable

import pytest
from stack_harness import Sumibi, eventually, free_ports


@pytest.fixture(scope="module")
def sumibi(tmp_path_factory) -> Sumibi:
    return Sumibi(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module", name="free_ports")
def _free_ports() -> Callable[[int], int]:
    return free_ports


@pytest.fixture(name="eventually")
def _eventually() -> Callable[..., None]:
    return eventually
