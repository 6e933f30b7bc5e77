"""As much of the Kubernetes API as a watcher needs: a list, then what changes, over HTTP/1.1.

A `Reflection` holds the objects of one collection as the API server has them. It lists, watches from the
list's resource version on, and lists anew when the server has forgotten that version (410), when a watch
breaks, and every `_RESYNC_S` anyway.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec

from sumibi.core.errors import EnvironmentProblem, SumibiError

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ANSWER_S: Final = 15.0
_WATCH_S: Final = 240
"""The server is asked to end a watch after so long."""
_SILENCE_S: Final = _WATCH_S + 30.0
_RETRY_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
_MAX_LINE: Final = 16 * 1024 * 1024
_GONE: Final = 410

log = logging.getLogger(__name__)


class ApiError(SumibiError):
    """The API server could not be asked, or answered with an error."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Api:
    """Where the API server is, and who asks it."""

    url: str
    """`https://host:port`; `http://` is for tests."""
    token_file: Path | None = None
    """Read for every request: the kubelet renews it."""
    tls: ssl.SSLContext | None = None

    async def get(self, path: str, **query: str) -> Any:
        """The JSON of an answer. Raises ApiError."""
        async with self._asked(path, query) as lines:
            return _decode(b"".join([line async for line in lines]))

    async def watch(self, path: str, **query: str) -> AsyncGenerator[Any, None]:
        """The events of a watch, until the server ends it. Raises ApiError."""
        async with self._asked(path, {**query, "watch": "1"}) as lines:
            async for line in lines:
                yield _decode(line)

    @contextlib.asynccontextmanager
    async def _asked(self, path: str, query: dict[str, str]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Ask; gives the lines of the answer's body."""
        parts = urlsplit(self.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_ANSWER_S):
                reader, writer = await asyncio.open_connection(host, port, ssl=self.tls, limit=_MAX_LINE)
                writer.write(self._head(f"{path}?{urlencode(query)}", parts.netloc))
                status, chunked = await _read_head(reader)
            lines = _lines(reader, chunked=chunked)
            if status != 200:
                with contextlib.suppress(asyncio.IncompleteReadError):
                    message = b"".join([line async for line in lines])[:300]
                raise ApiError(f"{path}: {status} {message.decode(errors='replace')}", status)
            yield lines
        except (
            *(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError),
            *(ValueError, IndexError),  # what answers does not speak HTTP
        ) as cause:
            raise ApiError(f"{path}: {cause or 'no answer in time'}") from cause
        finally:
            if writer is not None:
                writer.close()

    def _head(self, target: str, host: str) -> bytes:
        lines = [f"GET {target} HTTP/1.1", f"host: {host}", "accept: application/json", "connection: close"]
        if self.token_file is not None:
            lines.append(f"authorization: Bearer {self.token_file.read_text().strip()}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def in_cluster(environment: Mapping[str, str], account: Path = SERVICE_ACCOUNT) -> Api:
    """The API server of the cluster that this runs in. Raises EnvironmentProblem outside of one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    token, authority = account / "token", account / "ca.crt"
    if not host or not token.exists():
        raise EnvironmentProblem(
            "no Kubernetes API server is known here (KUBERNETES_SERVICE_HOST, and a service account's token):"
            " run in a pod, or name endpoints with --engine or --endpoints-file"
        )
    host = f"[{host}]" if ":" in host else host
    return Api(f"https://{host}:{port}", token, ssl.create_default_context(cafile=str(authority)))


def own_namespace(account: Path = SERVICE_ACCOUNT) -> str:
    """Of the pod that this runs in. Raises EnvironmentProblem outside of one."""
    try:
        return (account / "namespace").read_text().strip()
    except OSError as cause:
        raise EnvironmentProblem(f"no namespace is known: give --pool-namespace ({cause})") from cause


class Reflection:
    """See the module."""

    def __init__(
        self, api: Api, path: str, changed: Callable[[dict[str, Any]], Awaitable[None]], **selector: str
    ) -> None:
        """`changed` is called with all objects, by name, after every list and every change."""
        self.objects: dict[str, Any] = {}
        self.failures = 0
        """Lists and watches that broke."""
        self._api = api
        self._path = path
        self._changed = changed
        self._selector = selector

    async def run(self) -> None:
        """Until cancelled."""
        failed = 0
        while True:
            try:
                version = await self._list()
                failed = 0
                await self._watch(version)
            except ApiError as cause:
                if cause.status == _GONE:
                    continue
                self.failures += 1
                failed += 1
                if failed == 1:
                    log.warning("Kubernetes API: %s; trying again", cause)
                await asyncio.sleep(_RETRY_S[min(failed, len(_RETRY_S)) - 1])

    async def _list(self) -> str:
        """Take all objects over; their resource version."""
        page = await self._api.get(self._path, **self._selector)
        try:
            objects = {item["metadata"]["name"]: item for item in page["items"]}
            version = str(page["metadata"]["resourceVersion"])
        except (KeyError, TypeError) as cause:
            raise ApiError(f"{self._path}: the answer is no list") from cause
        self.objects = objects
        await self._changed(objects)
        return version

    async def _watch(self, version: str) -> None:
        """Follow changes until the server ends the watch."""
        watching = self._api.watch(
            self._path,
            **self._selector,
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(_WATCH_S),
        )
        async with contextlib.aclosing(watching) as events:
            async for event in events:
                kind, item = event.get("type"), event.get("object") or {}
                if kind == "ERROR":
                    raise ApiError(f"{self._path}: {item.get('message')}", item.get("code") or 0)
                name = item.get("metadata", {}).get("name")
                if kind in ("ADDED", "MODIFIED"):
                    self.objects[name] = item
                elif kind == "DELETED":
                    self.objects.pop(name, None)
                else:
                    continue  # a bookmark: every list begins anew anyway
                await self._changed(self.objects)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body comes in chunks)."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    status = head.split(" ", 2)[1]
    if not status.isdigit():
        raise ApiError("what answered does not speak HTTP")
    return int(status), "transfer-encoding: chunked" in head


async def _lines(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """The lines of a body (connection: close), what follows the last line end included."""
    rest = b""
    while True:
        async with asyncio.timeout(_SILENCE_S):
            if chunked:
                size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
                piece = (await reader.readexactly(size + 2))[:-2]
            else:
                piece = await reader.read(65536)
        if not piece:
            break
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > _MAX_LINE:
            raise ApiError("a line of the answer has no end")
        for line in lines:
            yield line
    if rest:
        yield rest


def _decode(text: bytes) -> Any:
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as cause:
        raise ApiError(f"the answer is no JSON: {cause}") from cause
    if not isinstance(decoded, dict):
        raise ApiError("the answer is no JSON object")
    return decoded
