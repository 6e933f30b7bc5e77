"""Connections and files: no more clients than there are files for, so that engines keep theirs."""

import asyncio
import resource

import pytest

from sumibi.gateway.http1 import Connection
from sumibi.gateway.main import MOST_CLIENTS, OTHER_FILES, clients_within, open_files
from sumibi.gateway.upstream import EngineConnection


@pytest.mark.parametrize(
    ("files", "clients"),
    [(1_000_000, 20_000), (40_200, 20_000), (40_198, 19_999), (1024, 412), (400, 100), (64, 1)],
)
def test_two_files_are_for_each_client(files, clients):
    assert clients_within(files) == clients
    assert files < OTHER_FILES or 2 * clients + OTHER_FILES <= max(files, 2 * MOST_CLIENTS + OTHER_FILES)


def test_the_limit_is_raised_as_far_as_is_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, hard = before
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 512), hard))
        found = open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == found == min(hard, 40_200)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("connection", [Connection, EngineConnection])
def test_connections_are_protocols_although_they_have_no_base(connection):
    """The loop calls all of these; `pause_writing` only for bodies that the other side reads slowly."""
    told = [name for name in vars(asyncio.Protocol) if not name.startswith("_")]
    told += [name for name in vars(asyncio.BaseProtocol) if not name.startswith("_")]
    assert {"data_received", "pause_writing", "connection_lost"} <= {*told}
    for name in told:
        assert callable(getattr(connection, name)), name
