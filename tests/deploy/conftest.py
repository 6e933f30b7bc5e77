"""Every test of manifests runs on every overlay."""

import pytest
from manifests import OVERLAYS, Thing, overlay


@pytest.fixture(params=OVERLAYS)
def things(request) -> tuple[Thing, ...]:
    """The objects of one overlay."""
    return overlay(request.param)
