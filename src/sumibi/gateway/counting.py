"""How long a prompt is (`/v1/messages/count_tokens`): answered here if its tokens are known here, else asked.

An exact count is the engine's own (that is what the grade means, and `agreement` watches over it), costs no
engine anything, and leaves the conversation read for the request that usually follows. What is not exact is
passed on as it is to the endpoint with the least to do. Nothing of this is a request to the router: no KV is
made, so there is nothing to place and nothing to reserve.
"""

import logging
from typing import Protocol

import msgspec

from sumibi.core.errors import BadRequest
from sumibi.gateway.errors import shape_in
from sumibi.gateway.headers import answer_ids, forwarded
from sumibi.gateway.http1 import Connection, Request
from sumibi.gateway.metrics import Metrics
from sumibi.gateway.passing import Passing
from sumibi.gateway.upstream import Call, Sink
from sumibi.prompts.dialects import PromptRequest
from sumibi.prompts.keys import Prompt, PromptGrade

log = logging.getLogger(__name__)


class Shell(Protocol):
    """What a question needs around it; one implementation, `shell.Shell`."""

    metrics: Metrics

    def idlest(self, model: str) -> str | None:
        """The endpoint of a model with the least to do, None if none is up."""

    def send(self, endpoint: str, path: bytes, head: bytes, body: bytes, sink: Sink) -> Call | None:
        """POST to an endpoint."""


class Counting(Passing):
    """One question. An `http1.Exchange` towards the client."""

    def __init__(
        self,
        shell: Shell,
        connection: Connection,
        request: Request,
        asked: PromptRequest,
        *,
        request_id: str,
        keep_credentials: bool,
    ) -> None:
        super().__init__(connection, request, shape_in(asked.dialect))
        self.asked = asked
        self._shell = shell
        self._connection = connection
        self._request = request
        self._request_id = request_id
        self._keep_credentials = keep_credentials
        self._gone = False

    def answer(self, prompt: Prompt) -> None:
        """The prompt was read: answer, or pass the question on."""
        if self._gone:
            return
        trusted = not self._shell.metrics.model(self.asked.model).agreement.alarm
        if prompt.grade is PromptGrade.EXACT and trusted:
            self._count("gateway")
            self._respond(200, msgspec.json.encode({"input_tokens": prompt.prompt_tokens}))
            return
        shell, request = self._shell, self._request
        endpoint = shell.idlest(self.asked.model)
        if endpoint is None:
            self._count("refused")
            message = "no engine that serves the model is up"
            body = shape_in(self.asked.dialect).body(503, message, "rejected-no-endpoints", None)
            self._respond(503, body)
            return
        self._count("engine")
        head = forwarded(request, self._request_id, keep_credentials=self._keep_credentials)
        head += b"content-length: %d\r\n" % request.body_bytes
        self.call = shell.send(endpoint, request.path.encode("latin-1"), head, request.body, self)

    def refuse(self, error: BadRequest) -> None:
        """The prompt cannot be read."""
        if not self._gone:
            self._count("refused")
            self._respond(error.status, shape_in(self.asked.dialect).body_of(error))

    def fail(self) -> None:
        """A bug of ours."""
        log.exception("counting the tokens of %s failed", self._request_id)
        if not self._gone:
            self._count("refused")
            self._respond(500, shape_in(self.asked.dialect).internal)

    def client_gone(self) -> None:
        """Nobody waits for the answer."""
        self._gone = True
        super().client_gone()

    def _respond(self, status: int, body: bytes) -> None:
        self._connection.respond(status, body, headers=answer_ids(self._request_id, self.asked.dialect))

    def _count(self, by: str) -> None:
        counts = self._shell.metrics.token_counts
        counts[by] = counts.get(by, 0) + 1
