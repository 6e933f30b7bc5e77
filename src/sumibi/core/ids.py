"""Ids that we make up: unique, sortable by creation within a process, safe in URLs and file names."""

import itertools
import os

_prefix = os.urandom(6).hex()
_counter = itertools.count(1)


def new_id(kind: str) -> str:
    """`new_id("req")` -> `req-3f9c...-1f`: random per process, then a counter (no system call each)."""
    return f"{kind}-{_prefix}-{next(_counter):x}"
