"""A listening socket and the connections that came in by it: counting, sweeping, draining.

Used twice: for the data plane and for the admin door. What a request means is the business of the
`Responder` given to it.
"""

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import Final, cast

from sumibi.core.errors import EnvironmentProblem
from sumibi.gateway.deadlines import Deadlines
from sumibi.gateway.errors import shape_of
from sumibi.gateway.http1 import Connection, Exchange, Limits, Request

_BACKLOG: Final = 2048

Responder = Callable[[Request, Connection], Exchange | None]
"""Answers a request at once (and returns None) or returns the exchange that will answer it."""

log = logging.getLogger(__name__)


class HttpServer:
    """Serves HTTP/1.1 on one address. `start` binds, `stop_accepting` and `drain` take it down."""

    def __init__(self, respond: Responder, limits: Limits, deadlines: Deadlines) -> None:
        self.limits = limits
        self.buffered_bytes = 0
        """Bytes of request bodies held by all connections now."""
        self.draining = False
        self.port = 0
        """The port bound (of use after asking for port 0)."""
        self.refused_connections = 0
        """Closed at once because `limits.connections` were open."""
        self.faults = 0
        """Requests that ended in a bug of ours (500)."""
        self._respond = respond
        self._deadlines = deadlines
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._connections)

    async def start(self, host: str, port: int, *, flag: str) -> None:
        """Bind and accept. Raises EnvironmentProblem naming the address and the flag that chose it."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: cast("asyncio.Protocol", Connection(self)), host, port, backlog=_BACKLOG
            )
        except OSError as cause:
            used = cause.errno == errno.EADDRINUSE or "in use" in str(cause)
            why = "the port is in use by another program" if used else str(cause)
            raise EnvironmentProblem(f"cannot listen on {host}:{port} ({flag}): {why}") from cause
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_accepting(self) -> None:
        """Take no new connections, and tell clients on open ones to go after their answer."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drain()

    async def drain(self, grace_s: float, hurry: asyncio.Event | None = None) -> bool:
        """Wait until every connection is closed; False if some were left after `grace_s`, or at `hurry`."""
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        while self._connections and loop.time() < end and not (hurry is not None and hurry.is_set()):
            await asyncio.sleep(0.05)
        return not self._connections

    def close_idle(self) -> None:
        """Close connections that nobody waits on."""
        for connection in list(self._connections):
            connection.close_idle()

    def abort(self) -> None:
        """Cut off every connection."""
        for connection in list(self._connections):
            connection.abort()

    # -- http1.Handler

    def opened(self, connection: Connection) -> bool:
        """A client connected."""
        if len(self._connections) >= self.limits.connections:
            self.refused_connections += 1
            if self.refused_connections == 1:
                log.warning("more than %d client connections: refusing new ones", self.limits.connections)
            return False
        self._connections.add(connection)
        self._deadlines.waiting.add(connection)
        return True

    def closed(self, connection: Connection) -> None:
        """A connection ended."""
        self._connections.discard(connection)
        self._deadlines.waiting.discard(connection)

    def handle(self, request: Request, connection: Connection) -> Exchange | None:
        """Hand a request on; a bug in the responder becomes a 500 and a traceback in the log."""
        try:
            return self._respond(request, connection)
        except Exception:
            self.faults += 1
            log.exception("%s %s failed", request.method, request.path)
            connection.respond(500, shape_of(request.path).internal)
            return None

    def error_body(self, status: int, message: str, path: str) -> bytes:
        """JSON of an error found below the level of dialects, in the words of who asks at `path`."""
        return shape_of(path).body(status, message, None, None)

    def now(self) -> float:
        """Seconds on the loop's clock."""
        return self._deadlines.loop.time()
