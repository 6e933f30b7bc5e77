"""Is this checkpoint directory whole? A manifest beside the files answers.

A conversion first writes the manifest with `complete = false`, then the files, then the manifest again
with every file's size and SHA-256. So a directory that was left half-way says so itself, wherever it
is moved to, and a file that was cut short or damaged later is named. A directory without a manifest
was made by somebody else: nothing is known about it, and nothing is claimed.
"""

import hashlib
import os
from pathlib import Path

import msgspec

from sumibi.core.errors import ModelError

MANIFEST = "sumibi-manifest.json"
_CHUNK_BYTES = 1 << 20


class FileRecord(msgspec.Struct, frozen=True):
    """What one file of a finished directory must look like."""

    name: str
    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """`complete` is false while a conversion runs; `files` lists everything but the manifest."""

    complete: bool
    source: str = ""
    files: list[FileRecord] = []


def begin(directory: Path) -> None:
    """Mark `directory` as unfinished, before its first file is written."""
    _write(directory, Manifest(complete=False))


def seal(directory: Path, *, source: str) -> None:
    """Sync every file to disk and record it: from here on the directory is whole. Raises OSError."""
    files = []
    for path in sorted(directory.iterdir()):
        if path.name == MANIFEST:
            continue
        path.chmod(0o644)
        _sync(path)
        files.append(FileRecord(path.name, path.stat().st_size, sha256(path)))
    _write(directory, Manifest(complete=True, source=source, files=files))
    _sync(directory)


def check(directory: Path, *, contents: bool = False) -> bool:
    """True if a manifest vouches for `directory`, False if there is none.

    Sizes are compared always; with `contents` the checksums too (about 1 s a GB). Raises ModelError
    that names the file and says what to do.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return False
    except (OSError, msgspec.MsgspecError) as cause:
        raise ModelError(f"{path} cannot be read ({cause}); {_remedy(directory)}") from cause
    if not manifest.complete:
        raise ModelError(f"the conversion into {directory} did not finish; {_remedy(directory)}")
    for record in manifest.files:
        file = directory / record.name
        size = file.stat().st_size if file.is_file() else None
        if size is None:
            raise ModelError(f"{file} is missing; {_remedy(directory)}")
        if size != record.size_bytes:
            raise ModelError(f"{file} has {size} bytes, not {record.size_bytes}; {_remedy(directory)}")
        if contents and sha256(file) != record.sha256:
            raise ModelError(f"{file} is damaged (its SHA-256 differs); {_remedy(directory)}")
    return True


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _remedy(directory: Path) -> str:
    return f"remove {directory} and convert again (`make setup` makes the default model)"


def _write(directory: Path, manifest: Manifest) -> None:
    temporary = directory / f"{MANIFEST}.tmp"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    _sync(temporary)
    temporary.replace(directory / MANIFEST)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
