"""The data plane's routes: from a whole HTTP request to a completion, a small answer or an error.

Everything about a request that can be wrong before an engine is asked is answered here, in the shape that
clients of its dialect expect. The body itself is never changed: an engine gets the client's bytes.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from urllib.parse import unquote

import msgspec

from sumibi.core.errors import BadRequest, EngineUnavailable, UnknownModel
from sumibi.gateway.asking import reader_for, refuse_what_is_ours, request_id
from sumibi.gateway.completion import Completion
from sumibi.gateway.counting import Counting
from sumibi.gateway.errors import OPENAI, error_body, shape_in
from sumibi.gateway.headers import EXPLAIN_HEADER, answer_ids
from sumibi.gateway.http1 import Connection, Exchange, Request
from sumibi.gateway.prompting import ModelReader, ModelReaders
from sumibi.gateway.shell import Shell
from sumibi.gateway.tenants import Tenants
from sumibi.gateway.terms import terms_of
from sumibi.prompts.dialects import DIALECTS, Dialect, PromptRequest, parse_request
from sumibi.prompts.keys import Prompt

log = logging.getLogger(__name__)


class ModelCard(msgspec.Struct):
    """One entry of /v1/models."""

    id: str
    max_model_len: int | None
    created: int
    object: str = "model"
    owned_by: str = "sumibi"


class Served(msgspec.Struct):
    """What the engines serve, as far as they have been seen."""

    cards: dict[str, ModelCard] = {}
    """Every model seen since the start: one whose engines are all down is still known."""
    ready: Callable[[], bool] = lambda: False
    """True if at least one endpoint is up."""


class App:
    """Answers requests of the data plane. Hand `respond` to a server."""

    def __init__(
        self,
        shell: Shell,
        readers: ModelReaders,
        served: Served,
        tenants: Tenants,
        objectives: Mapping[str, int],
        *,
        admin_key: str | None,
        render_metrics: Callable[[], bytes],
    ) -> None:
        self.draining = False
        """Say in /health that this gateway should get no new requests."""
        self._shell = shell
        self._readers = readers
        self._served = served
        self._tenants = tenants
        self._objectives = objectives
        self._admin_key = admin_key.encode() if admin_key else None
        self._render_metrics = render_metrics
        self._reading: set[asyncio.Task[None]] = set()

    def respond(self, request: Request, connection: Connection) -> Exchange | None:
        """Answer at once, or return the completion that will."""
        path = request.path
        dialect = DIALECTS.get(path)
        if dialect is not None:
            if request.method == "POST":
                return self._complete(path, dialect, request, connection)
            self._refuse_method(request, connection, ("POST",), dialect)
            return None
        answer = self._small(path)
        if answer is None:
            body = error_body(404, f"there is no {path} here", code="not_found")
            connection.respond(404, body, headers=self._ids(request))
        elif request.method not in ("GET", "HEAD"):
            self._refuse_method(request, connection, ("GET", "HEAD"))
        else:
            status, body, content_type = answer
            ids = self._ids(request) if status >= 400 else None
            connection.respond(status, body, content_type=content_type, headers=ids)
        return None

    # -- completions

    def _complete(
        self, path: str, dialect: Dialect, request: Request, connection: Connection
    ) -> Exchange | None:
        shell = self._shell
        started = shell.now()
        try:
            tenant = self._tenants.of(request.named)
            terms = terms_of(request.named, tenant, self._objectives)
            asked = parse_request(path, request.body)
            refuse_what_is_ours(asked)
            reader = reader_for(asked, self._readers)
            prompt = reader.read(asked, request.body_bytes)
        except (BadRequest, EngineUnavailable) as error:
            refused = shell.metrics.refused_requests
            refused[str(error.status)] = refused.get(str(error.status), 0) + 1
            body = shape_in(dialect).body_of(error)
            connection.respond(error.status, body, headers=self._ids(request, dialect))
            return None
        if dialect is Dialect.COUNT_TOKENS:
            return self._count(asked, reader, prompt, request, connection)
        completion = Completion(
            shell,
            connection,
            request,
            asked,
            request_id=request_id(request.named, self._shell.completions),
            tenant=tenant,
            terms=terms,
            counters=shell.metrics.model(asked.model),
            keep_credentials=not self._tenants.configured,
            explain=self._may_explain(request),
        )
        shell.add(completion)
        metrics = shell.metrics
        if prompt is None:
            self._read(self._arrive_later(completion, reader, request.body_bytes))
            return completion
        metrics.keys_s.observe(shell.now() - started)
        self._place(completion, prompt)
        return completion

    def _count(
        self,
        asked: PromptRequest,
        reader: ModelReader,
        prompt: Prompt | None,
        request: Request,
        connection: Connection,
    ) -> Exchange | None:
        """A question for the length of a prompt."""
        counting = Counting(
            self._shell,
            connection,
            request,
            asked,
            request_id=request_id(request.named, self._shell.completions),
            keep_credentials=not self._tenants.configured,
        )
        if prompt is not None:
            counting.answer(prompt)
        else:
            self._read(self._count_later(counting, reader, request.body_bytes))
        return counting

    async def _count_later(self, counting: Counting, reader: ModelReader, body_bytes: int) -> None:
        """Find keys that take their time; whatever goes wrong, the client gets an answer."""
        try:
            counting.answer(await reader.read_later(counting.asked, body_bytes))
        except BadRequest as error:
            counting.refuse(error)
        except Exception:
            counting.fail()

    def _read(self, later: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(later)
        self._reading.add(task)
        task.add_done_callback(self._reading.discard)

    async def _arrive_later(self, completion: Completion, reader: ModelReader, body_bytes: int) -> None:
        """Find keys that take their time; whatever goes wrong, the client gets an answer."""
        try:
            prompt = await reader.read_later(completion.asked, body_bytes)
            self._shell.metrics.keys_s.observe(self._shell.now() - completion.arrived_t)
        except BadRequest as error:
            completion.fail(error.status, shape_in(completion.asked.dialect).body_of(error))
        except Exception:
            log.exception("reading the prompt of %s failed", completion.id)
            completion.fail(500, shape_in(completion.asked.dialect).internal)
        else:
            self._place(completion, prompt)

    def _place(self, completion: Completion, prompt: Prompt) -> None:
        """Hand the request to the router; a bug on that way costs this request and no other."""
        shell = self._shell
        started = shell.now()
        try:
            completion.arrive(prompt)
        except Exception:
            log.exception("placing %s failed", completion.id)
            completion.fail(500, shape_in(completion.asked.dialect).internal)
        shell.metrics.placement_s.observe(shell.now() - started)

    def _may_explain(self, request: Request) -> bool:
        given = request.named.get(EXPLAIN_HEADER)
        return (
            given is not None and self._admin_key is not None and hmac.compare_digest(given, self._admin_key)
        )

    # -- answers of our own

    def _ids(self, request: Request, dialect: Dialect | None = None) -> list[tuple[bytes, bytes]]:
        return answer_ids(request_id(request.named, self._shell.completions), dialect)

    def _refuse_method(
        self,
        request: Request,
        connection: Connection,
        methods: tuple[str, ...],
        dialect: Dialect | None = None,
    ) -> None:
        allowed = ", ".join(methods)
        shape = OPENAI if dialect is None else shape_in(dialect)
        body = shape.body(405, f"only {allowed} is allowed here", "method_not_allowed", None)
        connection.respond(405, body, headers=[(b"allow", allowed.encode()), *self._ids(request, dialect)])

    def _small(self, path: str) -> tuple[int, bytes, bytes] | None:
        """(status, body, content type) of the routes that need no engine; None for no such route."""
        json = b"application/json"
        if path == "/health":
            ready = self._served.ready() and not self.draining
            why = "draining" if self.draining else "ok" if ready else "no endpoint is up"
            return 200 if ready else 503, msgspec.json.encode({"status": why}), json
        if path == "/metrics":
            return 200, self._render_metrics(), b"text/plain; version=0.0.4; charset=utf-8"
        if path == "/v1/models":
            return 200, _models(self._served.cards.values()), json
        if path.startswith("/v1/models/"):
            card = self._served.cards.get(unquote(path.removeprefix("/v1/models/")))
            if card is not None:
                return 200, msgspec.json.encode(card), json
            return (
                404,
                error_body(404, "no such model is served here", code=UnknownModel.code, param="model"),
                json,
            )
        return None


def _models(cards: Iterable[ModelCard]) -> bytes:
    return msgspec.json.encode({"object": "list", "data": list(cards)})
