"""A file that is not, to the last bit, what was written is never served."""

import pytest

from sumibi.tiers import DiskTier, Tier
from sumibi.tiers.blockfile import HEADER_BYTES, Corrupt, Header, check, checksum, encode_header


def test_the_layout_is_the_one_described():
    payload = bytes(range(256))
    raw = encode_header(Header(b"n" * 16, b"i" * 16, b"p" * 20, 256, checksum(payload)))
    assert len(raw) == HEADER_BYTES == 128
    assert raw[:16] == b"SUMIBIKV" + bytes([1, 0, 16, 20, 0, 0, 0, 0])
    assert raw[16:40] == (256).to_bytes(8, "little") + b"n" * 16
    assert raw[40:104] == b"i" * 16 + bytes(16) + b"p" * 20 + bytes(12)
    # XXH3-128 of no bytes, canonical form, as its author publishes it.
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_any_changed_byte_or_length_is_found():
    payload = b"\x00" * 300
    raw = encode_header(Header(b"n" * 16, b"i" * 16, None, 300, checksum(payload)))
    known = {"namespace": b"n" * 16, "content_id": b"i" * 16}
    assert check(raw, payload, **known).parent is None
    for at in range(128 + 300):
        for bit in (1, 128):
            whole = bytearray(raw + payload)
            whole[at] ^= bit
            with pytest.raises(Corrupt):
                check(whole[:128], whole[128:], **known)
    for size in (0, 299, 301):
        with pytest.raises(Corrupt):
            check(raw, bytes(size), **known)
    with pytest.raises(Corrupt):
        check(raw, payload, namespace=b"m" * 16, content_id=b"i" * 16)
    with pytest.raises(Corrupt):
        check(raw, payload, namespace=b"n" * 16, content_id=b"j" * 16)


@pytest.mark.parametrize("where", ["magic", "sum", "id", "payload", "short", "long", "empty", "swapped"])
@pytest.mark.parametrize("known", [True, False])
def test_a_broken_file_is_not_served_and_goes(kit, make, tmp_path, where, known):
    """Broken while a process knows it, and broken before one starts."""
    disk = DiskTier(str(tmp_path), 100 * kit.FILE)
    tiers = make(disk=disk)
    ids = kit.chain("a", 3)
    tiers.store(kit.blocks(ids))
    assert tiers.flush(5)
    if not known:
        tiers.close()
    path = next(tmp_path.rglob(f"{ids[1].hex()}.kv"))
    raw = bytearray(path.read_bytes())
    offset = {"magic": 0, "sum": 120, "id": 41, "payload": 600}.get(where)
    if offset is not None:
        raw[offset] ^= 4
    elif where == "short":
        del raw[-1]
    elif where == "long":
        raw += b"x"
    elif where == "empty":
        raw.clear()
    else:
        raw = next(tmp_path.rglob(f"{ids[2].hex()}.kv")).read_bytes()
    path.write_bytes(raw)
    if not known:
        tiers = make(disk=disk)
        assert tiers.flush(5)
    assert kit.load(tiers, ids) == [Tier.DISK, None, Tier.DISK]
    assert tiers.stats().tiers[Tier.DISK].corrupt == 1
    assert not path.exists()
    assert tiers.match(ids) == [Tier.DISK]
    assert tiers.store(kit.blocks(ids)) == 3
    assert tiers.flush(5)
    assert kit.load(tiers, ids) == [Tier.DISK] * 3
