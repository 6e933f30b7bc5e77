"""The admin door: decisions, fleet, prompts' readers. Its own port and its own key.

What it shows are side channels on other people's prompts (who shares a prefix with whom, how long prompts
are), so everything but the liveness check wants the key, and a key is made if none is given. A generated
key is only enough for a door that opens to this machine.
"""

import hmac
import ipaddress
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs

import msgspec

from sumibi.core.errors import ConfigError, EnvironmentProblem
from sumibi.gateway.errors import error_body
from sumibi.gateway.http1 import Connection, Request
from sumibi.gateway.metrics import EndpointCounters, Metrics
from sumibi.gateway.options import GatewayOptions
from sumibi.gateway.prompting import ModelReaders, Source
from sumibi.prompts.keys import ReaderStats
from sumibi.routing.decisions import Decision, Outcome
from sumibi.routing.router import Router
from sumibi.routing.views import Counters, EndpointView

_MAX_DECISIONS: Final = 1000
_DEFAULT_DECISIONS: Final = 100
_MIN_KEY: Final = 16


class Fleet(msgspec.Struct):
    """Answer of /fleet."""

    endpoints: list[EndpointView]
    """As the router sees them."""
    wire: dict[str, EndpointCounters]
    """As the gateway's connections see them."""
    counters: Counters


class Explanation(msgspec.Struct):
    """Answer of /requests/{id}: how one request was placed, try by try, and what came of it."""

    request: str
    in_flight: bool
    decisions: list[Decision]
    outcomes: list[Outcome]


class ReaderView(msgspec.Struct):
    """One model in the answer of /prompts."""

    source: Source
    stats: ReaderStats
    asked: int
    failed: int


def admin_key(options: GatewayOptions, state: Path) -> str:
    """The key of the admin door: given, read from a file, or made once and kept in the state directory.

    Raises ConfigError for a key that is too short, or for a door open to other machines without a key of
    one's own; EnvironmentProblem if no key can be kept.
    """
    if options.admin_key is not None:
        return _checked(options.admin_key, "--admin-key")
    if options.admin_key_file is not None:
        try:
            return _checked(options.admin_key_file.read_text().strip(), "--admin-key-file")
        except OSError as cause:
            raise ConfigError(f"--admin-key-file {options.admin_key_file}: {cause}") from cause
    if not is_loopback(options.admin_host):
        raise ConfigError(
            f"--admin-host {options.admin_host} opens the admin door to other machines: "
            "give a key with --admin-key or --admin-key-file"
        )
    return _kept_key(state / "admin.key")


def is_loopback(host: str) -> bool:
    """True if `host` can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _checked(key: str, flag: str) -> str:
    if len(key) < _MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{flag}: want at least {_MIN_KEY} printable ASCII characters without spaces")
    return key


def _kept_key(path: Path) -> str:
    """The key in `path`, readable by its owner only; made if there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)  # fails if another gateway was faster: then its key holds
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
        return _checked(path.read_text().strip(), str(path))
    except OSError as cause:
        raise EnvironmentProblem(f"cannot keep the admin key in {path}: {cause}; give --admin-key") from cause


class AdminDoor:
    """Answers requests of the admin port. Hand `respond` to a server."""

    def __init__(
        self,
        key: str,
        router: Router,
        metrics: Metrics,
        readers: ModelReaders,
        in_flight: Callable[[str], bool],
    ) -> None:
        self._key = key.encode()
        self._router = router
        self._metrics = metrics
        self._readers = readers
        self._in_flight = in_flight

    def respond(self, request: Request, connection: Connection) -> None:
        """Answer at once."""
        path = request.path
        if path == "/healthz":
            connection.respond(200, b'{"status":"ok"}')
        elif not self._allowed(request):
            body = error_body(401, "give the admin key as `Authorization: Bearer KEY` or `x-admin-key: KEY`")
            connection.respond(401, body, headers=[(b"www-authenticate", b"Bearer")])
        elif request.method not in ("GET", "HEAD"):
            connection.respond(
                405, error_body(405, "only GET is allowed here"), headers=[(b"allow", b"GET, HEAD")]
            )
        else:
            status, answer = self._answer(path, request.query)
            connection.respond(status, answer)

    def _allowed(self, request: Request) -> bool:
        given = request.named.get(b"x-admin-key", b"")
        scheme, _, bearer = request.named.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = bearer.strip()
        return hmac.compare_digest(given, self._key)

    def _answer(self, path: str, query: bytes) -> tuple[int, bytes]:
        """(status, JSON)."""
        encode = msgspec.json.encode
        match path.strip("/").split("/"):
            case ["decisions"]:
                limit = _limit(query)
                if limit is None:
                    return 400, error_body(400, f"limit: want 1..{_MAX_DECISIONS}", param="limit")
                return 200, encode({"decisions": self._router.decisions(limit)})
            case ["decisions", decision]:
                found = self._router.decision(decision)
                if found is None:
                    return 404, error_body(404, "no such decision (the newest are kept)")
                return 200, encode(self._explain(found.request))
            case ["requests", request]:
                explanation = self._explain(request)
                if not explanation.decisions and not explanation.in_flight:
                    return 404, error_body(404, "no such request (the newest are kept)")
                return 200, encode(explanation)
            case ["fleet"]:
                router = self._router
                return 200, encode(Fleet(router.fleet_view(), self._metrics.endpoints, router.counters()))
            case ["prompts"]:
                views = {
                    model: ReaderView(reader.source, reader.reader.stats(), reader.asked, reader.failed)
                    for model, reader in self._readers.readers.items()
                }
                return 200, encode({"models": views})
        return 404, error_body(404, f"there is no {path} here")

    def _explain(self, request: str) -> Explanation:
        router = self._router
        return Explanation(
            request=request,
            in_flight=self._in_flight(request),
            decisions=[d for d in router.decisions(_MAX_DECISIONS) if d.request == request],
            outcomes=[o for o in router.outcomes(_MAX_DECISIONS) if o.request == request],
        )


def _limit(query: bytes) -> int | None:
    """The `limit` of a query, its default if it has none, None if it is no number in range."""
    text = parse_qs(query.decode("latin-1")).get("limit", [str(_DEFAULT_DECISIONS)])[-1]
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= _MAX_DECISIONS:
        return None
    return int(text)
