"""Pairs carried out: a prompt computed on one replica, its KV fetched by another one that generates.

What a gateway with a serial connector does (vLLM's over NIXL): the request with one token to generate to
the prefill endpoint; when that has answered, the request itself to the decode endpoint, which fetches what it
lacks of the prompt and computes the last token. Each way costs the fleet's overhead. The first replica keeps
the KV until it has been fetched, for so long at most; where it is gone before, the second computes the prompt
itself.
"""

from collections.abc import Callable

from sumibi.routing.events import Dispatched, Event, FinishReason, Prefilled
from sumibi.sim.fleet import LinkSpec
from sumibi.sim.job import Job, State
from sumibi.sim.results import Status
from sumibi.sim.site import Call, Site


class Pairs:
    """The prefill legs of a world. It is told what becomes of them, and tells the router."""

    def __init__(
        self,
        overhead_s: float,
        *,
        push: Callable[[float, Callable[[float, object], None], object], None],
        tell: Callable[[Event], None],
        arm: Callable[[Site], None],
        enter: Callable[[float, object], None],
        close: Callable[[float, Call, Status], None],
    ) -> None:
        """`push` an action for later, `tell` the router, `arm` the clock of a site, have a call `enter` the
        engine where it decodes, `close` it for good.
        """
        self._overhead_s = overhead_s
        self._push, self._tell, self._arm, self._enter, self._close = push, tell, arm, enter, close

    def begin(self, t: float, call: Call, source: Site) -> None:
        """The call goes to `source` first."""
        call.source = source
        name = source.replica.name
        self._tell(Dispatched(t=t, request=call.name, attempt=call.attempt, endpoint=name))
        self._push(t + self._overhead_s, self._submit, (call, call.attempt))

    def _submit(self, t: float, what: object) -> None:
        """It comes to the queue of the prefill engine."""
        assert isinstance(what, tuple)
        call, attempt = what
        source = call.source
        if call.over or call.attempt != attempt or source is None:
            return
        if not source.alive:
            self._failed(t, call, FinishReason.REFUSED)
        elif not source.replica.fits(call.prompt_tokens, 1):
            self._failed(t, call, FinishReason.REJECTED)
        else:
            adapter = call.adapter_at(source)
            call.leg = Job(call, call.keys, call.prompt_tokens, 1, adapter=adapter, keep=True)
            source.replica.submit(call.leg, t)
            self._arm(source)

    def computed(self, t: float, call: Call) -> None:
        """Its prompt is: on to where it decodes."""
        leg, site = call.leg, call.site
        assert leg is not None
        assert site is not None
        attempt = call.attempt
        self._tell(
            Prefilled(
                t=t,
                request=call.name,
                attempt=attempt,
                prompt_tokens=leg.prompt_tokens,
                cached_tokens=leg.cached_tokens,
            )
        )
        name = site.replica.name
        self._tell(Dispatched(t=t, request=call.name, attempt=attempt, endpoint=name))
        self._push(t + self._overhead_s, self._enter, (call, attempt))
        assert call.source is not None
        keep_s = (call.source.replica.group.link or LinkSpec()).keep_s
        self._push(t + keep_s, self._expire, (call, leg))

    def job(self, call: Call, output_tokens: int) -> Job:
        """What the decode engine gets of a call whose leg is over."""
        leg, source, site = call.leg, call.source, call.site
        assert site is not None
        kept = leg is not None and leg.state is State.HELD
        if not kept:
            call.leg = None
        return Job(
            call,
            call.keys,
            call.prompt_tokens,
            output_tokens,
            adapter=call.adapter_at(site),
            imported=kept,
            source=source.replica.memory.link if kept and source is not None else None,
        )

    def fetched(self, t: float, call: Call) -> None:
        """The KV is where it is wanted."""
        self.end(t, call)

    def lost(self, t: float, call: Call, job: Job) -> None:
        """A prefill engine died with `job` in it."""
        if job is not call.leg:
            return
        call.leg = None
        self._failed(t, call, FinishReason.ENGINE_GONE)

    def gone(self, t: float, call: Call) -> None:
        """What was kept for a call is no longer there: it is computed where it decodes."""
        job, site = call.job, call.site
        if job is None or job.over or site is None:
            return  # it has not come there yet, or is gone from there
        if job.state is State.WAITING:
            job.imported = False
            job.source = None
        elif job.state is State.FETCHING:
            site.replica.abort(job, t)
            call.job = Job(
                call, call.keys, call.prompt_tokens, job.output_tokens, adapter=call.adapter_at(site)
            )
            site.replica.submit(call.job, t)
            self._arm(site)
        else:
            return  # it has all it needs
        call.leg = None

    def end(self, t: float, call: Call) -> None:
        """Nothing more is wanted of the leg, whatever its state."""
        leg, source = call.leg, call.source
        if leg is None or leg.over or source is None:
            return
        if leg.state is State.HELD:
            source.replica.release(leg, t)
        else:
            source.replica.abort(leg, t)
        self._arm(source)

    def _expire(self, t: float, what: object) -> None:
        assert isinstance(what, tuple)
        call, leg = what
        fetching = call.job is not None and call.job.state is State.FETCHING
        if call.over or call.leg is not leg or leg.state is not State.HELD or fetching:
            return
        self.end(t, call)
        self.gone(t, call)

    def _failed(self, t: float, call: Call, why: FinishReason) -> None:
        """The leg brought nothing: the router may have another idea."""
        before = call.attempt
        self._tell(Prefilled(t=t, request=call.name, attempt=before, failed=why))
        if call.attempt == before and not call.over:
            rejected = why is FinishReason.REJECTED
            self._close(t, call, Status.REJECTED if rejected else Status.FAILED)
