"""What a user says of storage: sizes, and where a shared store is. Both the stack file and the engine's flags
read it here, so that what one takes the other takes, too.
"""

import re
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sumibi.core.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_SHOWN = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
STORE_TIMEOUT_S: Final = 5.0
STORE_TIMEOUT_MOST_S: Final = 3600.0


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


def size_text(size_bytes: int) -> str:
    """The shortest text with a unit that `parse_bytes` reads as exactly so many bytes, like `512MiB`."""
    for unit_bytes, unit in _SHOWN:
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return str(size_bytes)


def said(text: str, where: str, what: str) -> str:
    """`text`, unless it is blank. Raises ConfigError naming `where`."""
    if not text.strip():
        raise ConfigError(f"{where}: {text!r} is empty; give {what}")
    return text


def store_directory(url: str, where: str = "kv tiers: store.url") -> Path | None:
    """The directory that a store's URL names; None: it names a bucket. Raises ConfigError where something is
    missing: blocks would be written elsewhere than is thought.
    """
    if "://" not in url:
        return Path(said(url, where, "a shared directory or s3://bucket/prefix"))
    try:
        parts = urlsplit(url)
    except ValueError as cause:
        raise ConfigError(f"{where}: {url!r} is no URL: {cause}") from cause
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


def check_directory(path: Path, where: str) -> None:
    """Raises ConfigError naming `where` if `path` can be no directory: it, or what is above it, is a file."""
    for part in (path, *path.parents):
        try:
            if part.is_dir():
                return
            if part.exists():
                raise ConfigError(
                    f"{where}: {str(path)!r} cannot be used: {part} is a file; give a directory"
                )
        except OSError:  # not for this user to look at: whoever uses it says so
            return
