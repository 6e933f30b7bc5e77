from hypothesis import given, settings
from hypothesis import strategies as st
from routing_lab import REPEATABLE, keys_of, prompt

from sumibi.core.keys import extend_keys, root_key
from sumibi.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored
from sumibi.routing.counters import Counters
from sumibi.routing.events import KeysAdded, KeysCopied, KeysRemoved, TierCleared
from sumibi.routing.source import Source

TOKENS = prompt("source", 96)


def source(block=16, *, served=("m",), orphans=100, lower=1000):
    return Source(
        "m",
        served,
        block,
        Counters(),
        max_device_blocks=1000,
        max_lower_tier_blocks=lower,
        max_orphan_blocks=orphans,
    )


def stored(hashes, tokens, *, parent=None, size=16, **fields):
    return BlockStored(list(hashes), parent, list(tokens), size, **fields)


def resident(changes, tier="gpu"):
    """What a set of keys is after these changes: the simplest reading of them."""
    keys, known = set(), set()
    for change in changes:
        match change:
            case TierCleared(name) if name == tier:
                keys.clear()
            case KeysAdded(name, _, added):
                known.update(added)
                keys.update(added if name == tier else ())
            case KeysCopied(name, added) if name == tier:
                keys.update(key for key in added if key in known)
            case KeysRemoved(name, removed) if name == tier:
                keys.difference_update(removed)
    return keys


def test_equal_sizes_give_one_key_a_block_chained_to_the_parent():
    s = source()
    first = s.apply([stored([1, 2], TOKENS[:32])])
    then = s.apply([stored([3], TOKENS[32:48], parent=2)])
    keys = keys_of(TOKENS[:48])
    assert first == [KeysAdded("gpu", None, keys[:2])]
    assert then == [KeysAdded("gpu", keys[1], keys[2:])]


def test_hashes_may_be_bytes():
    s = source()
    s.apply([stored([b"a"], TOKENS[:16])])
    assert resident(s.apply([stored([b"b"], TOKENS[16:32], parent=b"a")])) == {keys_of(TOKENS[:32])[1]}


def test_many_small_engine_blocks_make_a_routing_block_when_the_last_one_is_there():
    s = source(block=32)
    changes = s.apply([stored([1, 2, 3], TOKENS[:48])])
    key = keys_of(TOKENS, block=32)[0]
    assert resident(changes) == {key}
    changes += s.apply([BlockRemoved([1])])
    assert resident(changes) == set()
    changes += s.apply([stored([1], TOKENS[:16])])
    assert resident(changes) == {key}


def test_one_large_engine_block_makes_several_routing_blocks():
    s = source(block=16)
    keys = keys_of(TOKENS[:64])
    changes = s.apply([stored([1], TOKENS[:64], size=64)])
    assert resident(changes) == set(keys)
    assert resident(changes + s.apply([BlockRemoved([1])])) == set()


@given(
    st.sampled_from([(16, 32), (32, 16), (16, 16), (48, 32), (32, 48), (8, 32)]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 11), st.integers(1, 3)), max_size=40),
)
@settings(REPEATABLE, max_examples=200)
def test_a_routing_block_is_there_exactly_while_every_engine_block_under_it_is(sizes, steps):
    """Any ratio of sizes, blocks stored several times, removed early, never parent after child."""
    engine_size, size = sizes
    chain = [TOKENS[i : i + engine_size] for i in range(0, 96 - engine_size + 1, engine_size)]
    keys = keys_of(TOKENS, block=size)
    s, changes, copies = source(block=size), [], dict.fromkeys(range(len(chain)), 0)
    for store, at, count in steps:
        at %= len(chain)
        if store:
            last = min(at + count, len(chain))
            if at and not copies[at - 1]:
                continue  # its parent is unknown then: other tests
            tokens = [token for block in chain[at:last] for token in block]
            parent = at - 1 if at else None
            changes += s.apply([stored(range(at, last), tokens, parent=parent, size=engine_size)])
            for i in range(at, last):
                copies[i] += 1
        else:
            changes += s.apply([BlockRemoved([at])])
            copies[at] = max(0, copies[at] - 1)
    expected = set()
    for i, key in enumerate(keys):
        first, last = i * size // engine_size, ((i + 1) * size - 1) // engine_size
        if last < len(chain) and all(copies[b] for b in range(first, last + 1)):
            expected.add(key)
    assert resident(changes) == expected
    s.clear()
    assert not s._pools._shared


# Prompts that part in the middle of a routing block, and at its end. Engine blocks of 8 tokens.
PATHS = ["abcdefgh", "abcdefxy", "abpqrs", "abcdtu", "mn"]


def path_tokens(path):
    """Eight tokens a letter, of which the letter's place is a part."""
    return [ord(letter) * 100 + i * 8 + j for i, letter in enumerate(path) for j in range(8)]


@given(
    st.sampled_from([8, 16, 24, 32, 12]),
    st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "store", "remove", "remove", "clear"]),
            st.sampled_from(PATHS),
            st.integers(0, 7),
            st.integers(1, 5),
            st.sampled_from(["gpu", "gpu", "cpu"]),
        ),
        max_size=40,
    ),
)
@settings(REPEATABLE, max_examples=300)
def test_branches_within_routing_blocks_and_tiers_do_not_mix(size, steps):
    s, changes, copies = source(block=size), [], {"gpu": {}, "cpu": {}}
    for what, path, at, count, tier in steps:
        at %= len(path)
        names = [path[: i + 1] for i in range(len(path))]  # an engine's hash stands for all before it
        hashes = [name.encode() for name in names]
        if what == "clear":
            changes += s.apply([AllBlocksCleared()])
            copies["gpu"].clear()
        elif what == "remove":
            changes += s.apply([BlockRemoved([hashes[at]], medium=tier)])
            copies[tier][names[at]] = max(0, copies[tier].get(names[at], 0) - 1)
        elif not at or any(held.get(names[at - 1]) for held in copies.values()):
            last = min(at + count, len(path))
            tokens = path_tokens(path)[at * 8 : last * 8]
            parent = hashes[at - 1] if at else None
            changes += s.apply([stored(hashes[at:last], tokens, parent=parent, size=8, medium=tier)])
            for name in names[at:last]:
                copies[tier][name] = copies[tier].get(name, 0) + 1
    for tier, held in copies.items():
        expected = set()
        for path in PATHS:
            for i, key in enumerate(keys_of(path_tokens(path), block=size)):
                under = range(i * size // 8, -(-(i + 1) * size // 8))
                if all(held.get(path[: b + 1]) for b in under):
                    expected.add(key)
        assert resident(changes, tier) == expected
    s.clear()
    assert not s._pools._shared


def test_nothing_is_left_of_blocks_that_came_and_went():
    """F32, for routing blocks of several engine blocks."""
    s = source(block=32)
    for path in PATHS:
        hashes = [path[: i + 1].encode() for i in range(len(path))]
        s.apply([stored(hashes, path_tokens(path), size=8)])
    for path in PATHS:
        s.apply([BlockRemoved([path[: i + 1].encode()]) for i in range(len(path)) for _ in range(4)])
    assert not s._pools._shared
    assert all(not pool.chains and not pool.copies for pool in s._pools.by_name.values())


def test_blocks_removed_one_after_the_other_are_one_change():
    s = source()
    s.apply([stored([1, 2, 3], TOKENS[:48])])
    keys = keys_of(TOKENS[:48])
    assert s.apply([BlockRemoved([3]), BlockRemoved([2])]) == [KeysRemoved("gpu", [keys[2], keys[1]])]


def test_each_copy_of_a_block_is_removed_by_itself():
    """F22: duplicate stores are counted, an early remove does not count below zero."""
    s = source()
    key = keys_of(TOKENS[:16])[0]
    changes = s.apply(
        [BlockRemoved([1]), stored([1], TOKENS[:16]), stored([1], TOKENS[:16]), BlockRemoved([1])]
    )
    assert resident(changes) == {key}
    changes += s.apply([BlockRemoved([1]), BlockRemoved([1]), stored([1], TOKENS[:16])])
    assert resident(changes) == {key}
    assert resident(changes + s.apply([BlockRemoved([1])])) == set()


def test_children_of_an_unknown_parent_are_kept_until_it_comes():
    """F20: whole chains recover in any order; what was removed meanwhile is not there."""
    s = source()
    keys = keys_of(TOKENS[:80])
    changes = s.apply([stored([5], TOKENS[64:80], parent=4), stored([3, 4], TOKENS[32:64], parent=2)])
    changes += s.apply([BlockRemoved([4])])
    assert resident(changes) == set()
    assert s.orphan_blocks == 3
    changes += s.apply([stored([1, 2], TOKENS[:32])])
    assert resident(changes) == {keys[0], keys[1], keys[2], keys[4]}
    assert s.orphan_blocks == 0
    assert resident(changes + s.apply([BlockRemoved([3, 5])])) == {keys[0], keys[1]}


def test_orphans_are_bounded_and_the_oldest_go():
    s = source(orphans=4)
    for i in range(10):
        s.apply([stored([100 + i], TOKENS[16:32], parent=50 + i)])
    assert s.orphan_blocks == 4
    assert s._count.orphans_dropped == 6
    changes = s.apply([stored([59], TOKENS[:16]), stored([50], TOKENS[:16])])
    assert resident(changes) == set(keys_of(TOKENS[:32]))


def test_orphans_are_given_up_when_no_parents_can_come():
    s = source()
    s.apply([stored([2], TOKENS[16:32], parent=1)])
    s.drop_orphans()
    assert s.orphan_blocks == 0
    changes = s.apply([stored([1], TOKENS[:16])])
    assert resident(changes) == {keys_of(TOKENS[:16])[0]}


def test_clearing_empties_the_device_and_nothing_else():
    """F21: it names no tier; lower tiers live by their own events."""
    s = source()
    key = keys_of(TOKENS[:16])[0]
    changes = s.apply([stored([1], TOKENS[:16]), stored([1], TOKENS[:16], medium="CPU"), AllBlocksCleared()])
    assert resident(changes, "gpu") == set()
    assert resident(changes, "cpu") == {key}
    changes += s.apply([stored([1], TOKENS[:16]), BlockRemoved([1])])
    assert resident(changes, "gpu") == set()


def test_media_are_told_apart_whatever_their_case():
    s = source()
    key = keys_of(TOKENS[:16])[0]
    changes = s.apply([stored([1], TOKENS[:16], medium="GPU"), stored([1], TOKENS[:16], medium="Cpu")])
    changes += s.apply([BlockRemoved([1], medium="gpu")])
    assert resident(changes, "gpu") == set()
    assert resident(changes, "cpu") == {key}
    assert resident(changes + s.apply([BlockRemoved([1], medium="CPU")]), "cpu") == set()


def test_an_event_without_tokens_is_resolved_through_known_hashes_or_skipped():
    s = source()
    keys = keys_of(TOKENS[:32])
    changes = s.apply([stored([1, 2], TOKENS[:32])])
    changes += s.apply([stored([1, 7], [], size=0, medium="CPU")])
    assert resident(changes, "cpu") == {keys[0]}
    assert s._count.skipped_events == 1


def test_a_tier_that_never_reports_removals_is_bounded():
    """F28."""
    s, changes = source(lower=16), []
    for i in range(40):
        changes += s.apply([stored([i], prompt(i, 16), medium="STORAGE")])
    keys = resident(changes, "storage")
    assert len(keys) <= 16
    assert keys_of(prompt(39, 16))[0] in keys


def test_only_full_attention_groups_prove_residency():
    """F23: removes carry only the group's number, so its kind is learnt from stores."""
    s = source()
    key = keys_of(TOKENS[:16])[0]
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    assert s.apply([stored([1], TOKENS[:16], **window)]) == []
    changes = s.apply([stored([1], TOKENS[:16], group_idx=0, kv_cache_spec_kind="full_attention")])
    changes += s.apply([BlockRemoved([1], group_idx=1)])
    assert resident(changes) == {key}
    assert resident(changes + s.apply([BlockRemoved([1], group_idx=0)])) == set()


def test_with_several_full_attention_groups_all_must_hold_a_block():
    s = source()
    keys = keys_of(TOKENS[:32])
    changes = s.apply([stored([1, 2], TOKENS[:32], group_idx=0), stored([1], TOKENS[:16], group_idx=2)])
    assert resident(changes) == {keys[0]}
    assert resident(changes + s.apply([BlockRemoved([1], group_idx=2)])) == set()


def test_salts_separate_and_are_found_in_either_engine_s_place():
    vllm = stored([1, 2], TOKENS[:32], extra_keys=[["s"], None])
    sglang = stored([1, 2], TOKENS[:32], cache_salt="s")
    expected = set(keys_of(TOKENS[:32], salt="s"))
    assert resident(source().apply([vllm])) == expected
    assert resident(source().apply([sglang])) == expected
    assert not expected & set(keys_of(TOKENS[:32]))


def test_adapters_separate():
    """An adapter that clients ask for by its own name is keyed as prompts for that name are."""
    with_salt = stored([1], TOKENS[:16], lora_name="ad", lora_id=1, extra_keys=[["ad", "s"]])
    served = source(served=("m", "ad")).apply([with_salt])
    assert resident(served) == set(keys_of(TOKENS[:16], model="ad", salt="s"))
    unserved = source().apply([stored([1], TOKENS[:16], lora_name="ad", extra_keys=[["ad"]])])
    assert resident(unserved) == set(extend_keys(root_key("m", adapter="ad"), TOKENS[:16], 16))


def test_an_image_in_a_block_makes_it_another_block():
    plain = source().apply([stored([1, 2], TOKENS[:32])])
    image = source().apply([stored([1, 2], TOKENS[:32], extra_keys=[None, ["image-hash"]])])
    other = source().apply([stored([1, 2], TOKENS[:32], extra_keys=[None, ["another"]])])
    keys = keys_of(TOKENS[:32])
    assert resident(plain) == set(keys)
    assert resident(image) & resident(plain) == {keys[0]}
    assert resident(image) & resident(other) == {keys[0]}


def test_an_event_of_no_blocks_changes_nothing_whatever_else_it_says():
    assert resident(source().apply([stored([], [], extra_keys=[["salt"]])])) == set()


def test_a_grouped_store_counts_only_if_its_tokens_fill_its_blocks():
    s = source()
    assert s.apply([stored([1, 2], TOKENS[:20])]) == []
    assert s._count.skipped_events == 2


def test_what_was_stored_for_an_adapter_counts_for_nothing_once_it_is_not_served():
    s = source(served=("m", "ad"))
    adapter = stored([1, 2], TOKENS[:32], lora_name="ad", lora_id=1)
    changes = s.apply(
        [adapter, stored([11, 12], TOKENS[:32]), stored([1], TOKENS[:16], medium="CPU", lora_name="ad")]
    )
    own, base = keys_of(TOKENS[:32], model="ad"), keys_of(TOKENS[:32])
    assert resident(changes) == {*own, *base}
    gone = s.serve(["m"])
    assert gone == [KeysRemoved("gpu", own), KeysRemoved("cpu", own[:1])]
    assert resident(changes + gone) == set(base)
    # It comes back: nothing is there until it is stored anew, and removals go on counting.
    assert s.serve(["m", "ad"]) == []
    again = changes + gone + s.apply([stored([1], TOKENS[:16], lora_name="ad")])
    assert resident(again) == {own[0], *base}
    again += s.apply([BlockRemoved([1]), BlockRemoved([1, 2])])
    assert resident(again) == set(base)


def test_what_an_adapter_had_below_its_parent_s_return_does_not_come_back_by_itself():
    s = source(served=("m", "ad"))
    changes = s.apply([stored([1], TOKENS[:16], lora_name="ad")])
    changes += s.serve(["m"])
    changes += s.serve(["m", "ad"])
    changes += s.apply([stored([2], TOKENS[16:32], parent=1, lora_name="ad")])
    first, second = keys_of(TOKENS[:32], model="ad")
    assert resident(changes) == {second}  # a hole before it: no run reaches it
    changes += s.apply([stored([1], TOKENS[:16], lora_name="ad")])
    assert resident(changes) == {first, second}


def test_blocks_of_adapters_are_noted_within_bounds():
    s = source(served=("m", "ad"))
    for i in range(0, 4000, 4):
        s.apply([stored(range(i, i + 4), prompt(i, 64), lora_name="ad"), BlockRemoved(list(range(i, i + 4)))])
        s.apply([stored([10_000], TOKENS[:16])])
        assert len(s._adapters["ad"]) <= 2 + 4
    s.clear()
    assert not s._adapters
