"""Blocks as objects in an S3-compatible bucket, and the choice between that and a shared directory.

    PREFIX/<namespace, 32 hex digits>/<id in hex>.kv

A put is whole or not at all, so an object is never half there; what it holds is checked like a file's.
Objects have no time of last use: the oldest put goes first.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.core.storage import store_directory
from sumibi.tiers.blockfile import HEADER_BYTES, Corrupt, Header, check, encode_header
from sumibi.tiers.config import StoreTier
from sumibi.tiers.directory import SUFFIX, BlockDirectory, Found, Missing
from sumibi.tiers.host import as_bytes
from sumibi.tiers.s3words import KEYS, KEYS_FIX, failure
from sumibi.tiers.words import Buffer

if TYPE_CHECKING:
    from sumibi.tiers.store import Backend

_BUCKET = re.compile(r"s3://[A-Za-z0-9][\w.-]{1,253}[A-Za-z0-9](/|$)", re.ASCII)
"""As the most lenient of servers has it."""


def open_backend(config: StoreTier, namespace: bytes) -> "Backend":
    """What `config.url` names. Raises ConfigError, and EnvironmentProblem where that cannot be opened."""
    directory = store_directory(config.url)
    if directory is None:
        return Bucket(config.url, namespace, config.timeout_s)
    above = directory.absolute().parent
    if not above.is_dir():
        # Not made: below a share that is not mounted it would fill the machine's own disk.
        raise EnvironmentProblem(
            f"kv tiers: store.url {config.url!r}: {above} is not there; mount the share, or make it"
        )
    return BlockDirectory(str(directory), namespace)


class Bucket:
    """The objects of one namespace under the prefix of an `s3://` address.

    Endpoint, region and credentials come from the usual AWS_* variables (AWS_ENDPOINT_URL, AWS_REGION,
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY); an endpoint may be http:// or https://.
    """

    def __init__(self, url: str, namespace: bytes, timeout_s: float) -> None:
        """Raises ConfigError, and EnvironmentProblem where obstore is not installed."""
        try:
            import obstore
            from obstore.exceptions import (
                BaseError,
                NotFoundError,
                PermissionDeniedError,
                UnauthenticatedError,
            )
            from obstore.store import S3Store
        except ImportError as cause:
            raise EnvironmentProblem(
                "kv tiers: an s3:// store needs obstore: pip install 'sumibi[store]'"
            ) from cause
        self._obstore = obstore
        self._failures = BaseError
        self._absent = (NotFoundError, FileNotFoundError)
        self._refusals = (PermissionDeniedError, UnauthenticatedError)
        self.namespace = namespace
        self._home = f"{namespace.hex()}/"
        if not _BUCKET.match(url):
            raise ConfigError(
                f"kv tiers: store.url {url!r}: a bucket's name has 3 to 63 lower-case letters, digits, dots"
                " and hyphens; give s3://bucket/prefix"
            )
        wait = timedelta(seconds=timeout_s)
        try:
            self._store: Any = S3Store.from_url(
                url,
                client_options={"allow_http": True, "timeout": wait, "connect_timeout": wait},
                retry_config={"max_retries": 1, "retry_timeout": wait},
            )
        except (BaseError, ValueError) as cause:
            problem = f"kv tiers: store.url {url!r}: "
            if "Missing SecretAccessKey" in str(cause) or "Missing AccessKeyId" in str(cause):
                raise ConfigError(f"{problem}only one of {KEYS} is set; set both") from cause
            raise ConfigError(f"{problem}{failure('open', cause)}") from cause

    def prepare(self) -> None:
        """Nothing: a prefix needs no making."""

    def write(self, header: Header, payload: Buffer) -> int:
        """Put one object. Raises Refused where there is no such bucket, or these credentials may not."""
        whole = np.empty(HEADER_BYTES + header.payload_bytes, dtype=np.uint8)
        whole[:HEADER_BYTES] = as_bytes(encode_header(header))
        np.copyto(whole[HEADER_BYTES:], as_bytes(payload))
        try:
            self._obstore.put(self._store, self._key(header.content_id), whole.data, use_multipart=False)
        except self._absent as cause:
            raise failure("put", cause, "is AWS_ENDPOINT_URL the address of an S3 server?") from cause
        except self._refusals as cause:
            raise failure("put", cause, KEYS_FIX) from cause
        except self._failures as cause:
            raise failure("put", cause) from cause
        return whole.nbytes

    def read(self, content_id: bytes, into: Buffer) -> Header:
        """Get one object into `into`, checked."""
        try:
            got = self._obstore.get(self._store, self._key(content_id)).bytes()
        except self._absent:
            raise Missing from None
        except self._failures as cause:
            raise failure("get", cause) from cause
        raw = as_bytes(got)
        target = as_bytes(into)
        if raw.nbytes != HEADER_BYTES + target.nbytes:
            raise Corrupt("the object is shorter or longer than its block")
        np.copyto(target, raw[HEADER_BYTES:])
        return check(raw[:HEADER_BYTES].tobytes(), target, namespace=self.namespace, content_id=content_id)

    def exists(self, content_id: bytes) -> bool:
        """Ask for the object's head."""
        try:
            self._obstore.head(self._store, self._key(content_id))
        except self._absent:
            return False
        except self._failures as cause:
            raise failure("head", cause) from cause
        return True

    def touch(self, content_id: bytes) -> None:
        """Nothing: it would be a copy of the object."""

    def remove(self, content_id: bytes) -> None:
        """Delete one object."""
        self._delete([self._key(content_id)])

    def listing(self, *, temporary_older_than_s: float | None) -> Iterator[Found]:
        """Every object under the prefix, of every namespace. There are no half-written ones."""
        try:
            for chunk in self._obstore.list(self._store):
                for meta in chunk:
                    key = meta["path"]
                    namespace, _, name = key.rpartition("/")
                    if name.endswith(SUFFIX):
                        modified_s = meta["last_modified"].timestamp()
                        yield Found(key, name, namespace, meta["size"], modified_s)
        except self._failures as cause:
            raise failure("list", cause) from cause

    def discard(self, found: Sequence[Found]) -> None:
        """Delete listed objects."""
        self._delete([file.path for file in found])

    def clear(self) -> None:
        """Delete the namespace's objects, one listing after the other until there are none."""
        try:
            keys = [m["path"] for chunk in self._obstore.list(self._store, self._home) for m in chunk]
        except self._failures as cause:
            raise failure("list", cause) from cause
        self._delete(keys)

    def _delete(self, keys: list[str]) -> None:
        for first in range(0, len(keys), 1000):
            try:
                self._obstore.delete(self._store, keys[first : first + 1000])
            except self._absent:
                pass
            except self._failures as cause:
                raise failure("delete", cause) from cause

    def _key(self, content_id: bytes) -> str:
        return f"{self._home}{content_id.hex()}{SUFFIX}"
