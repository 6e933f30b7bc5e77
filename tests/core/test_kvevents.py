"""KV event batches: every layout seen on the wire decodes; the current one is what we send."""

import msgspec
import pytest

from sumibi.core.errors import WireError
from sumibi.core.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    encode_batch,
)

pack = msgspec.msgpack.encode
STORED = BlockStored(
    block_hashes=[7, 2**63 + 1], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2
)


def only(events):
    batch = decode_batch(0, pack([1.5, events, 0]))
    assert batch.skipped == 0
    assert len(batch.events) == 1
    return batch.events[0]


def test_what_we_send_is_the_map_form_with_defaults_left_out():
    sent = msgspec.msgpack.decode(encode_batch(1.5, [STORED, AllBlocksCleared()], rank=3))
    assert sent == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [7, 2**63 + 1],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
            },
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


def test_map_events_decode_and_unknown_keys_are_ignored():
    event = only(
        [{"locality": "LOCAL", "type": "BlockRemoved", "block_hashes": [b"x" * 32], "medium": "CPU"}]
    )
    assert event == BlockRemoved(block_hashes=[b"x" * 32], medium="CPU")


def test_positional_events_decode_short_and_long():
    short = only([["BlockStored", [7, 2**63 + 1], None, [1, 2, 3, 4], 2]])
    assert short == STORED
    slots = ["BlockStored", [1], 9, [5], 1, 4, "GPU", "ad1", [["ad1"]], 0, "full_attention", None, "later"]
    assert only([slots]) == BlockStored(
        block_hashes=[1],
        parent_block_hash=9,
        token_ids=[5],
        block_size=1,
        lora_id=4,
        medium="GPU",
        lora_name="ad1",
        extra_keys=[["ad1"]],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )
    assert only([["BlockRemoved", [1]]]) == BlockRemoved(block_hashes=[1])
    assert only([["AllBlocksCleared"]]) == AllBlocksCleared()


def test_a_metadata_map_in_the_adapter_slot_is_a_salt_and_no_adapter():
    event = only([["BlockStored", [1], None, [5], 1, None, "GPU", {"cache_salt": "t1"}]])
    assert event.cache_salt == "t1"
    assert event.lora_name is None


def test_an_unknown_or_broken_event_is_counted_and_the_rest_of_the_batch_lives():
    events = [{"type": "BlockMoved"}, ["BlockStored", [1]], 5, {"type": "BlockRemoved", "block_hashes": "x"}]
    batch = decode_batch(4, pack([0.0, [*events, ["AllBlocksCleared"]], None]))
    assert batch.events == [AllBlocksCleared()]
    assert (batch.seq, batch.skipped, batch.rank) == (4, 4, 0)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_a_token_that_is_none_makes_its_event_unknown(token):
    fields = {"block_hashes": [1], "parent_block_hash": None, "block_size": 1}
    good, bad = ({"type": "BlockStored", "token_ids": ids, **fields} for ids in ([5], [token]))
    batch = decode_batch(0, pack([0.0, [bad, good, ["BlockStored", [1], None, [token], 1]]]))
    assert batch.skipped == 2
    assert [event.token_ids for event in batch.events] == [[5]]


def test_a_batch_may_be_a_map_and_may_lack_its_rank():
    as_map = {"ts": 2.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 1}
    assert decode_batch(0, pack(as_map)).rank == 1
    assert decode_batch(0, pack([2.0, [{"type": "AllBlocksCleared"}]])).rank == 0


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"\xc1", pack(5), pack([]), pack([1.0]), pack({"ts": 1}), pack(["x", []])),
        b"\x91" * 5000,  # nested deeper than any decoder goes
    ],
)
def test_what_is_no_batch_is_a_wire_error(payload):
    with pytest.raises(WireError, match="KV event batch 9"):
        decode_batch(9, payload)


def test_an_event_whose_kind_is_no_word_is_skipped():
    batch = decode_batch(1, pack([1.0, [[["BlockStored"]], [{"a": 1}], [3], ["AllBlocksCleared"]], 0]))
    assert (batch.events, batch.skipped) == ([AllBlocksCleared()], 3)
