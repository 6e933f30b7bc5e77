"""What a user says about tiers: JSON such as
`{"host_bytes": "2GiB", "disk": {"path": "/var/kv", "bytes": "20GiB"}, "store": {"url": "s3://bucket/kv",
"bytes": "100GiB"}}`, parsed here and nowhere else.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from sumibi.core.errors import ConfigError
from sumibi.core.storage import STORE_TIMEOUT_MOST_S, STORE_TIMEOUT_S, parse_bytes, said, store_directory


class DiskTier(msgspec.Struct, frozen=True):
    """A directory on a local disk, this process's alone."""

    path: str
    bytes: int


class StoreTier(msgspec.Struct, frozen=True):
    """A directory (a path, or `file://`) or bucket (`s3://`) that several engines share."""

    url: str
    bytes: int
    timeout_s: float = STORE_TIMEOUT_S
    """How long one call of `find` or `load` may wait for the store in all."""

    def name(self, namespace: str) -> str:
        """What engines call the part of the store that holds the blocks of one namespace: the same for all
        that share it, if they were given the same URL (or the same path, links resolved).
        """
        directory = store_directory(self.url)
        url = self.url if directory is None else str(directory.resolve())
        return "store-" + blake2b(f"{url.rstrip('/')}\n{namespace}".encode(), digest_size=6).hexdigest()


class TiersConfig(msgspec.Struct, frozen=True):
    """Which tiers there are and how much each may hold. 0 bytes of host memory: no such tier."""

    host_bytes: int = 0
    disk: DiskTier | None = None
    store: StoreTier | None = None

    @classmethod
    def parse(cls, source: str | bytes | Mapping[str, Any], *, where: str = "kv tiers") -> "TiersConfig":
        """From JSON text or a mapping. `where` is the flag or key that errors name. Raises ConfigError."""
        try:
            raw = (
                msgspec.json.decode(source, type=_Raw)
                if isinstance(source, str | bytes)
                else msgspec.convert(source, _Raw)
            )
        except msgspec.MsgspecError as cause:
            raise ConfigError(
                f"{where}: {_short(source)} is not right: {cause}; expected an object with host_bytes, disk"
                " {path, bytes} and store {url, bytes}, each optional, sizes as numbers or like '20GiB'"
            ) from cause
        disk = (
            None
            if raw.disk is None
            else DiskTier(
                said(raw.disk.path, f"{where}.disk.path", "a directory"),
                parse_bytes(raw.disk.bytes, f"{where}.disk.bytes"),
            )
        )
        store = (
            None
            if raw.store is None
            else StoreTier(
                raw.store.url,
                parse_bytes(raw.store.bytes, f"{where}.store.bytes"),
                _positive(raw.store.timeout_s, f"{where}.store.timeout_s"),
            )
        )
        if store is not None:
            store_directory(store.url, f"{where}.store.url")
        config = cls(parse_bytes(raw.host_bytes, f"{where}.host_bytes", least=0), disk, store)
        if not config.host_bytes and not config.disk and not config.store:
            raise ConfigError(f"{where}: no tier is named; give host_bytes, disk or store, or leave it out")
        return config


class _RawDisk(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    bytes: int | str


class _RawStore(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    bytes: int | str
    timeout_s: float = STORE_TIMEOUT_S


class _Raw(msgspec.Struct, forbid_unknown_fields=True):
    host_bytes: int | str = 0
    disk: _RawDisk | None = None
    store: _RawStore | None = None


def _short(source: object) -> str:
    shown = repr(source)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _positive(value: float, where: str) -> float:
    if not 0 < value <= STORE_TIMEOUT_MOST_S:
        raise ConfigError(
            f"{where}: {value!r} is out of range; seconds, above 0 and at most {STORE_TIMEOUT_MOST_S:g}"
        )
    return value
