"""What a user says about tiers: JSON such as
`{"host_bytes": "2GiB", "disk": {"path": "/var/kv", "bytes": "20GiB"}, "store": {"url": "s3://bucket/kv",
"bytes": "100GiB"}}`, parsed here and nowhere else.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sumibi.core.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


class DiskTier(msgspec.Struct, frozen=True):
    """A directory on a local disk, this process's alone."""

    path: str
    bytes: int


class StoreTier(msgspec.Struct, frozen=True):
    """A directory (a path, or `file://`) or bucket (`s3://`) that several engines share."""

    url: str
    bytes: int
    timeout_s: float = 5.0
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
                _said(raw.disk.path, f"{where}.disk.path", "a directory"),
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
    timeout_s: float = 5.0


class _Raw(msgspec.Struct, forbid_unknown_fields=True):
    host_bytes: int | str = 0
    disk: _RawDisk | None = None
    store: _RawStore | None = None


def parse_bytes(value: int | str, where: str, *, least: int = 1) -> int:
    """A size in bytes: a number, or text with KiB, MiB, GiB or TiB. Raises ConfigError naming `where`."""
    if isinstance(value, str):
        found = _SIZE.fullmatch(value)
        unit = _UNITS.get(found[2].upper()) if found else None
        if found is None or unit is None:
            raise ConfigError(f"{where}: {value!r} is not a size; write bytes, or like '512MiB' or '20GiB'")
        size = int(float(found[1]) * unit)
    else:
        size = value
    if size < least:
        raise ConfigError(f"{where}: {value!r} is too small; at least {least} byte(s)")
    return size


def _short(source: object) -> str:
    shown = repr(source)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _said(text: str, where: str, what: str) -> str:
    if not text.strip():
        raise ConfigError(f"{where}: {text!r} is empty; give {what}")
    return text


def store_directory(url: str, where: str = "kv tiers: store.url") -> Path | None:
    """The directory that a store's URL names; None: it names a bucket. Raises ConfigError where something is
    missing: blocks would be written elsewhere than is thought.
    """
    parts = urlsplit(url)
    if "://" not in url:
        return Path(_said(url, where, "a shared directory or s3://bucket/prefix"))
    if parts.scheme == "file":
        if parts.netloc in ("", "localhost") and len(parts.path) > 1:
            return Path(parts.path)
        raise ConfigError(
            f"{where}: {url!r} names the host {parts.netloc!r} and the directory {parts.path!r}; a directory"
            " of this machine, where a share may be mounted, is file:///its/path"
        )
    if parts.scheme != "s3":
        raise ConfigError(
            f"{where}: {url!r} has the scheme {parts.scheme!r}; give a directory (a path or file://) or"
            " s3://bucket/prefix"
        )
    if not parts.netloc:
        raise ConfigError(f"{where}: {url!r} names no bucket; give s3://bucket/prefix")
    return None


def _positive(value: float, where: str) -> float:
    if not 0 < value <= 3600:
        raise ConfigError(f"{where}: {value!r} is out of range; seconds, above 0 and at most 3600")
    return value
