"""The targets of `make fuzz`, for a moment each, with inputs that hypothesis makes up and shrinks."""

import pytest
from fuzz_targets import TARGETS, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

EXAMPLES = 120


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_crash_a_parser_or_make_it_disagree(name):
    target = TARGETS[name]
    for data in seeds(name):
        target(data)

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(st.binary(max_size=200))
    def tried(data):
        target(data)

    tried()
