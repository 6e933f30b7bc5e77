"""A request from its first message to the router: what it is for, whose it is, whether it may be.

Requests for text are read as the HTTP gateway reads them and become `Exchange`s. Everything else (a list of
models, a health check, another API of the engine) goes to any endpoint that is up and leaves no trace in the
ledger, as it makes no KV.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Final

import msgspec

from sumibi.core.errors import BadRequest, EngineUnavailable
from sumibi.gateway.asking import reader_for, refuse_what_is_ours, request_id
from sumibi.gateway.epp.estimates import Estimates
from sumibi.gateway.epp.exchange import Exchange, address_of, error_headers, not_forwarded, renamed
from sumibi.gateway.epp.stream import NO_BODY, Asked, End, Stream
from sumibi.gateway.errors import ErrorShape, shape_of
from sumibi.gateway.prompting import ModelReader, ModelReaders
from sumibi.gateway.shell import Shell
from sumibi.gateway.tenants import Tenants
from sumibi.gateway.terms import terms_of
from sumibi.prompts.dialects import DIALECTS, Dialect, PromptRequest, parse_request
from sumibi.prompts.keys import Prompt

REWRITE_HEADERS: Final = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")
"""Name the model that is meant, whatever the body says; the body is changed to it."""

log = logging.getLogger(__name__)


class Picker:
    """What all visits share."""

    def __init__(
        self,
        shell: Shell,
        readers: ModelReaders,
        tenants: Tenants,
        objectives: Mapping[str, int],
        estimates: Estimates,
        *,
        max_body_bytes: int,
        fallbacks: int,
        response_phase: bool,
        subset_filter: bool,
    ) -> None:
        self.shell = shell
        self.readers = readers
        self.tenants = tenants
        self.objectives = objectives
        self.estimates = estimates
        self.max_body_bytes = max_body_bytes
        self.fallbacks = fallbacks
        """Addresses named to Envoy beside the first."""
        self.response_phase = response_phase
        """Answers are looked at, if Envoy shows them."""
        self.subset_filter = subset_filter
        """Subset hints count."""
        self.visits: set[Visit] = set()
        self.ends: dict[str, int] = {}
        """How requests ended, by `End`."""
        self.passed_on = 0
        """Requests that are not for text."""
        self.states_served = False
        """Envoy has said whose an answer is."""
        self.not_forwarded = not_forwarded(
            keep_credentials=not tenants.configured, reads_answers=response_phase
        )
        self._turn = 0

    def sees(self, stream: Stream) -> bool:
        """Whether the answer to a request will be seen to its end."""
        return self.response_phase and stream.response_body_mode != NO_BODY

    def anybody(self, only: list[str] | None) -> str | None:
        """The address of an endpoint that is up, in turn; None if there is none. `only`: of these names."""
        endpoints = self.shell.metrics.endpoints
        up = [name for name, counters in endpoints.items() if counters.up and (only is None or name in only)]
        if not up:
            return None
        self._turn += 1
        return address_of(up[self._turn % len(up)])

    def named(self, subset: list[str] | None) -> list[str] | None:
        """The endpoints that a subset hint means; None: all. An address without a port means all ports."""
        if subset is None or not self.subset_filter:
            return None
        wanted = frozenset(subset)
        return [name for name in self.shell.targets if _meant(address_of(name), wanted)]


class Visit:
    """One request. The owner of its `Stream`."""

    def __init__(self, picker: Picker, flush: Callable[[], None]) -> None:
        """`flush` has what stands in `stream.out` sent; it is called for answers that come later."""
        self.stream = Stream(picker.max_body_bytes)
        self.exchange: Exchange | None = None
        self._picker = picker
        self._flush = flush
        self._receiving = False
        self._reading: asyncio.Task[None] | None = None
        picker.visits.add(self)

    def receive(self, message: object) -> None:
        """Take a message; a bug on the way costs this request and no other."""
        self._receiving = True
        try:
            self.stream.receive(message, self)
        except Exception:
            log.exception("a request failed")
            self._bug()
        finally:
            self._receiving = False

    @property
    def finished(self) -> bool:
        """Nothing more is to be said or heard of it."""
        stream = self.stream
        return stream.end is not None or (stream.sent and not self._picker.response_phase)

    def closed(self) -> None:
        """Its stream is over, however that happened."""
        picker = self._picker
        picker.visits.discard(self)
        if self._reading is not None:
            self._reading.cancel()
        end = self.stream.closed()
        if end is End.ABORTED and self.stream.sent and not picker.sees(self.stream):
            word = "unseen"
        else:
            word = end.value
        picker.ends[word] = picker.ends.get(word, 0) + 1
        exchange, self.exchange = self.exchange, None
        if exchange is not None and end is End.ABORTED:
            exchange.aborted()

    # -- stream.Owner

    def asked(self, request: Asked) -> None:
        """See what it is for."""
        dialect = DIALECTS.get(request.path)
        if request.method != "POST" or dialect is None:
            self._pass_on(request, None)
        else:
            self._place(request, dialect)

    def too_large(self) -> None:
        """413."""
        most = self._picker.max_body_bytes
        self._refuse(shape_of(""), 413, f"the body is longer than {most} bytes (--max-body-bytes)")

    def answering(self, status: int, headers: dict[bytes, bytes], served: str) -> None:
        """Its answer begins."""
        if served:
            self._picker.states_served = True
        if self.exchange is not None:
            self.exchange.answering(status, headers, served)

    def piece(self, data: bytes) -> None:
        """A piece of its answer."""
        if self.exchange is not None:
            self.exchange.piece(data)

    def complete(self) -> None:
        """Its answer is whole."""
        if self.exchange is not None:
            self.exchange.complete()

    # -- inside

    def _place(self, request: Asked, dialect: Dialect) -> None:
        picker = self._picker
        shell = picker.shell
        started = shell.now()
        try:
            request = _rewritten(request)
            tenant = picker.tenants.of(request.named)
            terms = terms_of(request.named, tenant, picker.objectives)
            asked = parse_request(request.path, request.body)
            refuse_what_is_ours(asked)
            reader = reader_for(asked, picker.readers)
            if dialect is Dialect.COUNT_TOKENS:
                self._pass_on(request, asked.model)
                return
            prompt = reader.read(asked, len(request.body))
        except (BadRequest, EngineUnavailable) as error:
            refused = shell.metrics.refused_requests
            refused[str(error.status)] = refused.get(str(error.status), 0) + 1
            reason = "rejected-no-endpoints" if isinstance(error, EngineUnavailable) else ""
            self.stream.refuse(error.status, error_headers(reason), shape_of(request.path).body_of(error))
            return
        self.exchange = exchange = Exchange(
            picker,
            self.stream,
            request,
            asked,
            request_id=request_id(request.named, shell.completions),
            tenant=tenant,
            terms=terms,
            counters=shell.metrics.model(asked.model),
            wake=self._wake,
        )
        shell.add(exchange)
        if prompt is None:
            self._later(self._arrive_later(exchange, reader, request))
            return
        shell.metrics.keys_s.observe(shell.now() - started)
        self._arrive(exchange, prompt, request)

    async def _arrive_later(self, exchange: Exchange, reader: ModelReader, request: Asked) -> None:
        """Find keys that take their time; whatever goes wrong, the client gets an answer."""
        asked: PromptRequest = exchange.asked
        try:
            prompt = await reader.read_later(asked, len(request.body))
            self._picker.shell.metrics.keys_s.observe(self._picker.shell.now() - exchange.arrived_t)
        except BadRequest as error:
            exchange.fail(error.status, shape_of(request.path).body_of(error))
        except Exception:
            log.exception("reading the prompt of %s failed", exchange.id)
            exchange.fail(500, shape_of(request.path).internal)
        else:
            self._arrive(exchange, prompt, request)

    def _arrive(self, exchange: Exchange, prompt: Prompt, request: Asked) -> None:
        shell = self._picker.shell
        started = shell.now()
        try:
            picker = self._picker
            exchange.arrive(prompt, picker.named(request.subset), followed=picker.sees(self.stream))
        except Exception:
            log.exception("placing %s failed", exchange.id)
            self._bug()
        shell.metrics.placement_s.observe(shell.now() - started)

    def _pass_on(self, request: Asked, model: str | None) -> None:
        """To an endpoint that is up (and serves `model`, if that is given)."""
        picker = self._picker
        if model is not None:
            endpoint = picker.shell.idlest(model)
            address = None if endpoint is None else address_of(endpoint)
        else:
            address = picker.anybody(picker.named(request.subset))
        if address is None:
            self._refuse(shape_of(request.path), 503, "no endpoint is up", "rejected-no-endpoints")
            return
        picker.passed_on += 1
        self.stream.send_to(address, [], [], request.body)

    def _refuse(self, shape: ErrorShape, status: int, message: str, reason: str = "") -> None:
        refused = self._picker.shell.metrics.refused_requests
        refused[str(status)] = refused.get(str(status), 0) + 1
        self.stream.refuse(status, error_headers(reason), shape.body(status, message, reason or None, None))

    def _bug(self) -> None:
        if self.exchange is not None:
            self.exchange.fail(500, shape_of("").internal)
        self.stream.refuse(500, error_headers(""), shape_of("").internal)
        self._wake()

    def _wake(self) -> None:
        if not self._receiving:
            self._flush()

    def _later(self, work: Coroutine[None, None, None]) -> None:
        self._reading = asyncio.get_running_loop().create_task(work)


def _rewritten(request: Asked) -> Asked:
    """With the model in its body that a header says. Raises BadRequest if there is no such body."""
    name = next((value for header in REWRITE_HEADERS if (value := request.named.get(header))), None)
    if name is None:
        return request
    try:
        return request._replace(body=renamed(request.body, name.decode()))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise BadRequest(f"the body is no JSON object whose model could be rewritten: {cause}") from cause


def _meant(address: str, wanted: frozenset[str]) -> bool:
    host, _, _ = address.rpartition(":")
    return address in wanted or host in wanted or host.strip("[]") in wanted
