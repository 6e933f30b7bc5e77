"""Blocks as files under a directory: the disk tier's and the shared directory's format.

    ROOT/<namespace, 32 hex digits>/<last two digits of the id>/<id in hex>.kv

In a shared directory each block is a file, found by its name. On a disk of its own a process may put several
blocks of a chain into one file, one after the other: the name is the first one's, the others are found by
whoever read the file's headers.

A file is written under a temporary name and renamed, so whoever opens a name finds a whole file, whatever
was killed when. It is not synced: a cache may lose its last seconds when the power goes, and what was torn
then is found by its sums. Nothing here relies on locks; a file may vanish at any moment and that is a miss.
"""

import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sumibi.tiers.blockfile import HEADER_BYTES, Corrupt, Header, check, decode_header, encode_header
from sumibi.tiers.direct import DirectReads
from sumibi.tiers.host import Bytes
from sumibi.tiers.words import Buffer

_TEMPORARY = ".tmp-"
_TRASH = ".trash-"
SUFFIX = ".kv"
_HERE = "".join(c if c.isalnum() else "_" for c in socket.gethostname())[:32]


class Missing(Exception):
    """There is no such block."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file as a listing sees it."""

    path: str
    name: str
    namespace: str
    size_bytes: int
    modified_s: float
    """By the clock of whoever holds the files."""

    @property
    def content_id(self) -> bytes:
        """The id that the name gives; empty where the name is none of ours."""
        try:
            return bytes.fromhex(self.name.removesuffix(SUFFIX))
        except ValueError:
            return b""


class BlockDirectory:
    """The files of one namespace (to read and write) under a root that other namespaces share (to bound)."""

    def __init__(self, root: str | Path, namespace: bytes) -> None:
        self.root = Path(root)
        self.namespace = namespace
        self.home = self.root / namespace.hex()

    def prepare(self) -> None:
        """Make the directories. Raises OSError."""
        self.home.mkdir(parents=True, exist_ok=True)

    def path(self, content_id: bytes) -> str:
        """Where a block lies or would lie."""
        name = content_id.hex()
        return f"{self.home}/{name[-2:]}/{name}{SUFFIX}"

    def write(self, header: Header, payload: Buffer) -> int:
        """Put one block; the bytes of its file. Raises OSError, leaving nothing behind."""
        return self.write_run([(header, payload)])

    def write_run(self, blocks: Sequence[tuple[Header, Buffer]]) -> int:
        """Put some blocks into one file; its bytes. Raises OSError, leaving nothing behind."""
        path = self.path(blocks[0][0].content_id)
        parts = [
            memoryview(part).cast("B")
            for header, payload in blocks
            for part in (encode_header(header), payload)
        ]
        size_bytes = sum(part.nbytes for part in parts)
        folder = os.path.dirname(path)
        temporary = f"{folder}/{_TEMPORARY}{_HERE}-{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            try:
                fd = os.open(temporary, flags, 0o644)
            except FileNotFoundError:
                os.makedirs(folder, exist_ok=True)
                fd = os.open(temporary, flags, 0o644)
            try:
                _write_all(fd, parts)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        return size_bytes

    def read_run(
        self, ids: Sequence[bytes], first: int, end: int, reads: DirectReads
    ) -> list[tuple[Header, Bytes] | None]:
        """Blocks `first` to before `end` of the file in which `ids` lie, in memory that the calling thread's
        next read fills anew; None for one that is not, whole and unchanged, what it should be.

        Raises Missing, Corrupt (the file is longer or shorter than it should be) or OSError.
        """
        each = reads.block_bytes
        try:
            raw = reads.read(self.path(ids[0]), len(ids) * each, first * each, (end - first) * each)
        except FileNotFoundError:
            raise Missing from None
        return [self._checked(raw[i * each : (i + 1) * each], ids[first + i]) for i in range(end - first)]

    def _checked(self, raw: Bytes, content_id: bytes) -> tuple[Header, Bytes] | None:
        payload = raw[HEADER_BYTES:]
        head = raw[:HEADER_BYTES].tobytes()
        try:
            return check(head, payload, namespace=self.namespace, content_id=content_id), payload
        except Corrupt:
            return None

    def read(self, content_id: bytes, into: Buffer) -> Header:
        """Fill `into` with the block and check it there. Raises Missing, Corrupt or OSError; `into` is then
        of no meaning.
        """
        try:
            fd = os.open(self.path(content_id), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Missing from None
        try:
            head = bytearray(HEADER_BYTES)
            payload = memoryview(into).cast("B")
            if _read_all(fd, [memoryview(head), payload]) != HEADER_BYTES + len(payload) or os.read(fd, 1):
                raise Corrupt("the file is shorter or longer than its block")
        finally:
            os.close(fd)
        return check(head, payload, namespace=self.namespace, content_id=content_id)

    def exists(self, content_id: bytes) -> bool:
        """Is there a file of that name? Raises OSError other than its absence."""
        try:
            os.stat(self.path(content_id))
        except FileNotFoundError:
            return False
        return True

    def touch(self, content_id: bytes) -> None:
        """Mark as used now, for whoever orders files by their time. A vanished file is no matter."""
        with suppress(FileNotFoundError):
            os.utime(self.path(content_id))

    def remove(self, content_id: bytes) -> None:
        """Take a block away; absent is as good."""
        with suppress(FileNotFoundError):
            os.unlink(self.path(content_id))

    def discard(self, found: Sequence[Found]) -> None:
        """Take listed files away, whatever their namespace; absent is as good."""
        for file in found:
            with suppress(FileNotFoundError):
                os.unlink(file.path)

    def clear(self) -> None:
        """Take the whole namespace away, at once for whoever looks by name."""
        trash = self.root / f"{_TRASH}{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):
            os.rename(self.home, trash)
        shutil.rmtree(trash, ignore_errors=True)

    def listing(self, *, temporary_older_than_s: float | None) -> Iterator[Found]:
        """Every block file of every namespace, in no order. What was left half-written or half-removed goes:
        all of it where `temporary_older_than_s` is None (nobody else writes here), else what is that old by
        the directory's own clock.
        """
        now_s = self._clock_s() if temporary_older_than_s is not None else 0.0
        for namespace in _entries(self.root):
            if namespace.name.startswith(_TRASH):
                shutil.rmtree(namespace.path, ignore_errors=True)
            elif namespace.name.startswith(_TEMPORARY):
                _remove_old(namespace, now_s, temporary_older_than_s)
            elif namespace.is_dir(follow_symlinks=False):
                for folder in _entries(namespace.path):
                    if not folder.is_dir(follow_symlinks=False):
                        continue
                    for file in _entries(folder.path):
                        if file.name.startswith(_TEMPORARY):
                            _remove_old(file, now_s, temporary_older_than_s)
                        elif file.name.endswith(SUFFIX):
                            with suppress(FileNotFoundError):
                                stat = file.stat(follow_symlinks=False)
                                yield Found(file.path, file.name, namespace.name, stat.st_size, stat.st_mtime)

    def headers_of(self, found: Found, block_bytes: int) -> list[Header]:
        """What a listed file of this namespace says is in it, blocks of `block_bytes` bytes with their
        headers; nothing where it is none of ours or misshapen.
        """
        count, rest = divmod(found.size_bytes, block_bytes)
        if rest:
            return []
        try:
            with open(found.path, "rb", buffering=0) as file:
                headers = [
                    decode_header(os.pread(file.fileno(), HEADER_BYTES, i * block_bytes))
                    for i in range(count)
                ]
        except (OSError, Corrupt):
            return []
        fits = all(
            header.namespace == self.namespace and header.payload_bytes == block_bytes - HEADER_BYTES
            for header in headers
        )
        return headers if fits and headers and found.name == headers[0].content_id.hex() + SUFFIX else []

    def _clock_s(self) -> float:
        """The time as the file system tells it: its files are stamped by it, not by this host's clock."""
        probe = f"{self.root}/{_TEMPORARY}{_HERE}-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            with suppress(OSError):
                os.unlink(probe)


def _entries(path: str | Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        return


def _remove_old(entry: os.DirEntry[str], now_s: float, older_than_s: float | None) -> None:
    with suppress(OSError):
        if older_than_s is None or now_s - entry.stat(follow_symlinks=False).st_mtime > older_than_s:
            os.unlink(entry.path)


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        done = os.writev(fd, parts)
        parts = _rest(parts, done)


def _read_all(fd: int, parts: list[memoryview]) -> int:
    """Fill `parts` from the start of the file; bytes read, fewer where the file ends before."""
    total = 0
    while parts:
        done = os.preadv(fd, parts, total)
        if not done:
            break
        total += done
        parts = _rest(parts, done)
    # os.read after preadv starts at 0: put the position where the reading ended.
    os.lseek(fd, total, os.SEEK_SET)
    return total


def _rest(parts: list[memoryview], done: int) -> list[memoryview]:
    left = []
    for part in parts:
        if done >= len(part):
            done -= len(part)
        else:
            left.append(part[done:] if done else part)
            done = 0
    return left
