"""The trie of segments against plain lists: what it knows is right, whatever was read and dropped."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sumibi.core.keys import extend_keys
from sumibi.prompts.segments import Place, SegmentStore

BLOCK = 4
ROOT = 77
paths = st.lists(st.sampled_from("abcd"), max_size=6)


def tokens_of(name):
    """Token ids that a name stands for: from none to more than two blocks."""
    return list(range(100 * ord(name), 100 * ord(name) + 3 * (ord(name) - ord("a"))))


def put(store, path, root=ROOT):
    at, known = store.walk(store.root(root, (1,)), path)
    for name in path[known:]:
        at = store.add(at, name, tokens_of(name))
    return at, known


def whole(path):
    return [1, *(token for name in path for token in tokens_of(name))]


@given(st.lists(paths, max_size=8), st.sampled_from([1 << 20, 6000, 0]))
def test_keys_and_tokens_are_those_of_the_whole_path(read, limit_bytes):
    store = SegmentStore(BLOCK, limit_bytes=limit_bytes, keep_token_ids=True)
    for path in read:
        end, _ = put(store, path)
        if path:  # as a conversation is remembered: where it ended, and where it goes on
            store.name(repr(path).encode(), Place(end, end.parent))
        assert end.tokens == len(whole(path))
        assert store.use(end) == (extend_keys(ROOT, whole(path), BLOCK), whole(path))
        store.check_integrity()


@given(st.lists(paths, max_size=8))
def test_a_path_is_known_as_far_as_any_other_went(read):
    store = SegmentStore(BLOCK, limit_bytes=1 << 20, keep_token_ids=False)
    for number, path in enumerate(read):
        expected = max((common(path, other) for other in read[:number]), default=0)
        end, known = put(store, path)
        assert known == expected
        store.use(end)


def common(one, other):
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def known(store, path):
    return store.walk(store.root(ROOT, (1,)), path)[1]


def test_the_path_used_longest_ago_goes_first_and_whole():
    store = SegmentStore(BLOCK, limit_bytes=6000, keep_token_ids=False)
    old, middle = "abcc", "adbb"
    for path in (old, middle, old):
        store.use(put(store, path)[0])
    assert store.evicted == 0
    store.use(put(store, "ddd")[0])
    assert (known(store, old), known(store, "ddd")) == (4, 3)
    assert known(store, middle) == 1  # what it shares with the other
    assert store.evicted == 3


def test_a_path_that_is_in_use_stays_although_its_beginning_is_old():
    store = SegmentStore(BLOCK, limit_bytes=6500, keep_token_ids=False)
    path = "abc"
    for name in "dcbadcba":
        store.use(put(store, [name])[0])
        store.use(put(store, path)[0])
    assert known(store, path) == 3


def test_a_name_goes_with_the_end_of_its_place():
    store = SegmentStore(BLOCK, limit_bytes=5000, keep_token_ids=False)
    end, _ = put(store, "ab")
    place = Place(end, end.parent, "tail")
    store.name(b"one", place)
    store.use(end)
    assert store.find(b"one") == place
    for name in "cdcdcdcd":
        store.use(put(store, [name, name])[0])
        store.check_integrity()
    assert not end.alive
    assert store.find(b"one") is None


def test_an_end_keeps_its_newest_names():
    store = SegmentStore(BLOCK, limit_bytes=1 << 20, keep_token_ids=False)
    end, _ = put(store, "ab")
    names = [bytes([number]) for number in range(20)]
    for name in names:
        store.name(name, Place(end))
        store.name(name, Place(end))
    store.check_integrity()
    assert [store.find(name) is not None for name in names] == 12 * [False] + 8 * [True]


def test_roots_are_apart():
    store = SegmentStore(BLOCK, limit_bytes=1 << 20, keep_token_ids=False)
    put(store, "abc")
    assert put(store, "abc", root=ROOT + 1)[1] == 0


@pytest.mark.parametrize("keep_token_ids", [False, True])
def test_the_bytes_counted_are_about_the_bytes_taken(keep_token_ids):
    store = SegmentStore(32, limit_bytes=1 << 30, keep_token_ids=keep_token_ids)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for conversation in range(20):
            at = store.root(ROOT)
            for turn in range(100):
                name = f"<|im_start|>user\n{conversation} {turn} " + "x" * 200
                at = store.add(at, name, range(1000, 1000 + 60))
            store.use(at)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.8 < store.bytes / (after - before) < 1.3
