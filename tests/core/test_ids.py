"""Ids differ and carry their kind."""

from sumibi.core.ids import new_id


def test_ids_are_unique_and_say_their_kind():
    ids = {new_id("req") for _ in range(1000)}
    assert len(ids) == 1000
    assert all(i.startswith("req-") for i in ids)
