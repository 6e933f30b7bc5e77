"""Routing keys and content ids: chained, separated, and equal to a slow spelling of their definition."""

import struct
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64

from sumibi.core.content import content_id, content_root
from sumibi.core.keys import common, extend_keys, root_key

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def slow_keys(parent, ids, block):
    keys = []
    for i in range(len(ids) // block):
        packed = b"".join(struct.pack("<I", t) for t in ids[i * block : (i + 1) * block])
        parent = xxh3_64(packed, seed=parent).intdigest()
        keys.append(parent)
    return keys


@given(tokens, st.integers(1, 40))
def test_keys_follow_their_definition(ids, block):
    root = root_key("m")
    assert extend_keys(root, ids, block).tolist() == slow_keys(root, ids, block)


@given(tokens, st.integers(1, 40), st.integers(0, 5))
def test_keys_of_a_prefix_extend_to_the_keys_of_the_whole(ids, block, blocks):
    root = root_key("m")
    whole = extend_keys(root, ids, block)
    head = extend_keys(root, ids[: blocks * block], block)
    tail = extend_keys(head[-1] if head else root, ids[len(head) * block :], block)
    assert head + tail == whole


def test_the_same_block_after_another_prefix_has_another_key():
    root = root_key("m")
    a = extend_keys(root, [1, 1, 2, 2], 2)
    b = extend_keys(root, [3, 3, 2, 2], 2)
    assert a[1] != b[1]


def test_every_separator_separates():
    roots = {
        root_key("m"),
        root_key("m", adapter="a"),
        root_key("m", adapter_version="a"),
        root_key("m", salt="a"),
        root_key("ma"),
        root_key("", adapter="m"),
    }
    assert len(roots) == 6


def test_token_ids_beyond_32_bits_are_refused():
    with pytest.raises(OverflowError):
        extend_keys(root_key("m"), [2**32], 1)


def test_content_ids_follow_their_definition_and_are_keyed_by_salt():
    namespace = "m|w0|bf16|32"
    root = content_root(namespace)
    assert root == blake2b(namespace.encode(), digest_size=16).digest()
    assert content_id(root, [1, 2]) == blake2b(root + struct.pack("<II", 1, 2), digest_size=16).digest()
    salted = content_root(namespace, salt="tenant-7")
    assert salted != root
    assert content_id(salted, [1, 2]) != content_id(root, [1, 2])
    assert content_root(namespace, salt="x" * 200) != content_root(namespace, salt="x" * 201)


@pytest.mark.parametrize("equal", range(1, 9))
@pytest.mark.parametrize("shift", [-2, 0, 3])
def test_what_two_prompts_have_in_common_is_found_wherever_one_of_them_is_cut(equal, shift):
    start = max(0, -shift)
    chain = extend_keys(root_key("m"), [*range(equal)], 1)
    ours = [0] * start + chain.tolist() + extend_keys(chain[-1], [100] * (8 - equal), 1).tolist()
    theirs = [0] * (start + shift) + chain.tolist() + extend_keys(chain[-1], [200] * (8 - equal), 1).tolist()
    for high in range(1, 9):
        assert common(ours, theirs, start + 1, start + high, shift) == start + min(equal, high)
