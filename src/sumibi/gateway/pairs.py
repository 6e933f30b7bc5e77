"""The executor of pairs: a prompt computed by one engine, its KV taken over by another that generates.

By a connector's declaration (`engines.connectors`) it makes the two requests out of the client's, sends the
prefill half, reads its answer and says to its owner what came of it. The decode half's answer is the owner's
business, as every other answer is.

One rule for errors, whatever the connector: a prefill half that brought nothing ends the decode half too, if
that has left already, and what follows is for the router to say.
"""

from typing import Final, Protocol

from sumibi.core.errors import WireError
from sumibi.engines.connectors import (
    Connector,
    Order,
    PrefillAnswer,
    Values,
    decode_body,
    prefill_body,
    read_prefill_answer,
    unpairable,
)
from sumibi.gateway.http1 import Header
from sumibi.gateway.upstream import Call, Sink
from sumibi.routing.events import FinishReason

_MAX_ANSWER_BYTES: Final = 8 * 1024 * 1024
"""Of a prefill half: longer than any list of block ids. More is read and thrown away."""

OK, NO_PARAMETERS, UNFIT, NO_CONNECTOR, KEPT, DECODE_FAILED = (
    "ok",
    "bad-parameters",
    "unfit-request",
    "no-connector",
    "kept",
    "decode-failed",
)
"""Outcomes of prefill halves beside reasons for failures: as counted. `kept`: its parameters were left over
from an attempt whose decode engine refused the connection. `decode-failed`: whatever became of the half, the
decode engine could not go on with it (its KV did not come, for instance).
"""


class Failure:
    """Why a prefill half brought nothing."""

    __slots__ = ("body", "detail", "headers", "outcome", "reason", "status")

    def __init__(
        self,
        reason: FinishReason,
        outcome: str,
        detail: str,
        status: int = 0,
        headers: list[Header] | None = None,
        body: bytes = b"",
    ) -> None:
        self.reason = reason
        self.outcome = outcome
        self.detail = detail
        self.status = status
        """Of the engine's answer, with the rest of it; 0: there was none."""
        self.headers = headers or []
        self.body = body


class Owner(Protocol):
    """Who has a pair run."""

    def send_prefill(self, endpoint: str, body: bytes, sink: Sink) -> Call | None:
        """POST to the prefill endpoint; a failure comes soon if that is gone."""

    def prefill_over(self, pair: "Pair", answer: PrefillAnswer) -> None:
        """The prompt is computed."""

    def prefill_failed(self, pair: "Pair", failure: Failure) -> None:
        """It is not."""


class Pair:
    """One attempt on two endpoints. An `upstream.Sink` towards the prefill engine."""

    def __init__(
        self, owner: Owner, connector: Connector, prefill: str, api: str, body: bytes, values: Values
    ) -> None:
        self.connector = connector
        self.prefill = prefill
        """Endpoint."""
        self.answer: PrefillAnswer | None = None
        """Of the prefill half, once it is there."""
        self._owner = owner
        self._api = api
        self._body = body
        self._values = values
        self._call: Call | None = None
        self._status = 0
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._bytes = 0
        self._over = False

    @property
    def concurrent(self) -> bool:
        """Both halves leave at once."""
        return self.connector.order is Order.CONCURRENT

    def unfit(self, *, answers: int, prompts: int) -> str:
        """Why the request cannot be run as a pair, empty if it can: KV is handed over once, for one sequence,
        and in the APIs that the connector is spoken in.

        Raises BadRequest if the body is no JSON object.
        """
        if answers > 1:
            return "n"
        if prompts > 1:
            return "prompt"
        return unpairable(self.connector, self._api, self._body)

    def begin(self) -> None:
        """Send the prefill half; what comes of it is told to the owner."""
        body = prefill_body(self.connector, self._api, self._body, self._values)
        self._call = self._owner.send_prefill(self.prefill, body, self)

    def decode_body(self) -> bytes:
        """The decode half's request; of serial connectors once `answer` is there."""
        values = self._values
        if self.answer is not None:
            values = Values(values.host, values.port, values.room, values.transfer_id, self.answer.returned)
        return decode_body(self.connector, self._body, values)

    def cancel(self) -> None:
        """Nobody wants it any more: the prefill engine is told by closing the connection."""
        self._over = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    # -- upstream.Sink

    def answer_head(self, status: int, headers: list[Header]) -> None:
        """Kept until the end."""
        self._status, self._headers = status, headers

    def answer_body(self, pieces: list[bytes], *, last: bool) -> None:
        """Kept up to a bound."""
        self._bytes += sum(map(len, pieces))
        if self._bytes <= _MAX_ANSWER_BYTES:
            self._pieces += pieces
        else:
            self._pieces.clear()

    def answer_end(self) -> None:
        """See what it brought."""
        self._call = None
        if self._over:
            return
        self._over = True
        status, body = self._status, b"".join(self._pieces)
        self._pieces.clear()
        if not 200 <= status < 300:
            reason = FinishReason.REJECTED
            if status >= 500 or status == 429:
                reason = FinishReason.ENGINE_ERROR
            detail = f"it answered {status} to a prefill"
            self._fail(Failure(reason, reason.value, detail, status, self._headers, body))
            return
        try:
            self.answer = read_prefill_answer(self.connector, body)
        except WireError as cause:
            self._fail(Failure(FinishReason.ENGINE_ERROR, NO_PARAMETERS, str(cause)))
            return
        self._owner.prefill_over(self, self.answer)

    def answer_failed(self, reason: FinishReason, detail: str) -> None:
        """No answer."""
        self._call = None
        if not self._over:
            self._over = True
            self._fail(Failure(reason, reason.value, detail))

    def _fail(self, failure: Failure) -> None:
        self._owner.prefill_failed(self, failure)
