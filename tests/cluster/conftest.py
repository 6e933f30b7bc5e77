"""Definitions of custom resources lie beside the repository, where there are any."""

from pathlib import Path

import pytest

from sumibi.cluster.schemas import Definitions

CRDS = Path(__file__).resolve().parents[2].parent / "shared" / "crds"


@pytest.fixture(scope="session")
def definitions() -> Definitions:
    if not CRDS.is_dir():
        pytest.skip(f"needs the definitions of custom resources in {CRDS}")
    return Definitions.load(CRDS)
