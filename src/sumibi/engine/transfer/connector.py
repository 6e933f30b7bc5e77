"""Plugs transfers into an engine: a KV source for requests that bring blocks, a sink for those to be kept.

Sequences say by their ticket what they want (`tickets`); every other sequence passes through to the source
and sink that were there before, such as the tiers below the device. Called in the step thread, except where
it says otherwise.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from uuid import uuid4

import msgspec
from msgspec import UNSET

from sumibi.core.errors import BadRequest
from sumibi.core.ids import new_id
from sumibi.core.priority import give_way
from sumibi.engine.loading import Done, KVSink, KVSource, Load
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.sequence import FinishReason, Sequence
from sumibi.engine.transfer.config import KVTransferConfig
from sumibi.engine.transfer.frames import TransferError
from sumibi.engine.transfer.memory import BlockMemory
from sumibi.engine.transfer.metrics import TransferMetrics
from sumibi.engine.transfer.offers import KeptBlock, Offers
from sumibi.engine.transfer.params import KeepRequest, PullRequest, TransferAnswer
from sumibi.engine.transfer.pulling import Pulled, Side, beat, pull, release
from sumibi.engine.transfer.secret import read_secret
from sumibi.engine.transfer.sidechannel import SideChannel
from sumibi.engine.transfer.tickets import Fetch, Keep, Ticket, block_names

log = logging.getLogger(__name__)

SOURCE = "p2p"
"""vLLM's name for tokens that came from another engine."""
_BEATS_A_LEASE = 6
_NOTIFIERS = 8
_MAX_NOTICES = 4096
"""Releases and heartbeats that wait for a thread; more are dropped and counted, and leases run out."""
_MARGIN_S = 5.0
"""A pull ends itself before the engine's loop gives it up."""


class TransferPage(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /kv_transfer`: what a gateway needs to know to pair this engine."""

    engine_id: str
    kv_connector: str
    kv_role: str
    remote_host: str
    remote_port: int
    namespace: str
    block_size: int
    secured: bool
    """Peers have to know a secret."""
    kv_lease_duration: float


class Transfers:
    """One engine's. `open` and `read_ticket` are the event loop's; `start` before the first step."""

    def __init__(
        self,
        config: KVTransferConfig,
        *,
        host: str,
        model: str,
        namespace: str,
        memory: BlockMemory,
        scheduler: Scheduler,
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[Sequence, str], None],
    ) -> None:
        """`namespace` names all that makes blocks differ, the layout of their bytes included.

        `post` runs a call in the step thread; `fail`, called there, ends a sequence with an error. Raises
        ConfigError, EnvironmentProblem. Puts itself before the scheduler's source and sink.
        """
        extra = config.kv_connector_extra_config
        self.config = config
        self.engine_id = uuid4().hex
        self._scheduler = scheduler
        self._size = scheduler.pool.block_tokens
        self._post = post
        self._fail = fail
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._waiting: dict[Fetch, None] = {}  # whose leases want heartbeats
        self._beating: set[tuple[str, int]] = set()
        self._told_fallback = False
        self._notices = threading.BoundedSemaphore(_MAX_NOTICES)
        self._notifiers = ThreadPoolExecutor(_NOTIFIERS, "kv-notify")
        digest = blake2b(f"{namespace};bytes={memory.block_bytes}".encode(), digest_size=16)
        secret, note = read_secret(extra.secret_file)
        if note:
            log.warning("%s", note)
        self._side = Side(digest.digest(), memory, "shm" in extra.transports, secret)
        self._offers = Offers(lease_s=extra.kv_lease_duration, give_back=self._unpin)
        self.metrics = TransferMetrics(model, kept=lambda: len(self._offers))
        self._channel: SideChannel | None = None
        if config.produces:
            self._channel = SideChannel(
                config.side_channel_host(host),
                extra.port,
                offers=self._offers,
                memory=memory,
                metrics=self.metrics,
                namespace=self._side.namespace,
                engine_id=self.engine_id,
                secret=secret,
                lease_s=extra.kv_lease_duration,
                timeout_s=extra.kv_transfer_timeout,
            )
        self._beats = threading.Thread(target=self._beat_all, name="kv-heartbeats", daemon=True)
        self.page = TransferPage(
            engine_id=self.engine_id,
            kv_connector=config.kv_connector,
            kv_role=config.kv_role,
            remote_host=self._channel.host if self._channel else "",
            remote_port=self._channel.port if self._channel else 0,
            namespace=digest.hexdigest(),
            block_size=self._size,
            secured=secret is not None,
            kv_lease_duration=extra.kv_lease_duration,
        )
        scheduler.source = _Source(self, scheduler.source)
        scheduler.sink = _Sink(self, scheduler.sink)

    def start(self) -> None:
        """Take connections, send heartbeats."""
        if self._channel is not None:
            self._channel.start()
        self._beats.start()

    def stop(self) -> None:
        """End transfers. May be called in any state, once."""
        self._stopping.set()
        self._offers.end_all()
        if self._channel is not None:
            self._channel.stop()
        self._notifiers.shutdown(wait=False, cancel_futures=True)

    # ---- the event loop ----

    def open(self, asked: KeepRequest | PullRequest) -> Ticket:
        """The ticket for a new sequence. Raises BadRequest for a transfer id in use."""
        if isinstance(asked, PullRequest):
            fetch = Fetch(asked)
            with self._lock:
                self._waiting[fetch] = None
            return fetch
        keep = Keep(asked.transfer_id or new_id("kv"), asked.transfer_id)
        if not self._offers.begin(keep.key):
            raise BadRequest(
                f"kv_transfer_params.transfer_id: {keep.key} was used before; take a new one a try",
                param="kv_transfer_params.transfer_id",
            )
        return keep

    # ---- the step thread ----

    def running(self, sequence: Sequence) -> None:
        """The sequence got a token: if its blocks were not asked for until now, they are not needed."""
        if isinstance(sequence.transfer, Fetch):
            self._settle(sequence.transfer)

    def offered(self, sequence: Sequence, fetch: Fetch, first_block: int) -> int:
        """Tokens of the prompt that the peer has, from block `first_block` on."""
        prompt = sequence.prompt_tokens
        there = prompt if fetch.request.num_tokens is None else min(fetch.request.num_tokens, prompt)
        if there < prompt:
            there -= there % self._size
        return there - first_block * self._size

    def fetch(self, fetch: Fetch, load: Load, done: Done) -> None:
        """Begin to fill the load's blocks."""
        fetch.begun = True
        sequence = load.sequence
        prompt = sequence.tokens[: sequence.prompt_tokens]
        names = block_names(sequence.root, sequence.content_ids, prompt, self._size)
        wanted = names[load.first_block : load.end_block]
        call = partial(self._pull, fetch, load, wanted, list(load.blocks), done)
        # A thread each: there are at most as many as sequences, and most of them wait.
        threading.Thread(target=call, name="kv-pull", daemon=True).start()

    def filled(self, sequence: Sequence, keep: Keep) -> None:
        """More of a prompt is computed."""
        self._publish(sequence, keep, min(sequence.filled, sequence.prompt_tokens // self._size))

    def ended(self, sequence: Sequence) -> None:
        """A sequence with a ticket has ended."""
        ticket = sequence.transfer
        if isinstance(ticket, Fetch):
            self._settle(ticket)
        elif isinstance(ticket, Keep):
            if sequence.finish in (FinishReason.LENGTH, FinishReason.STOP) and sequence.table:
                self._keep(sequence, ticket)
            else:
                self._offers.end(ticket.key, "aborted")

    def _keep(self, sequence: Sequence, keep: Keep) -> None:
        count = -(-sequence.prompt_tokens // self._size)
        self._publish(sequence, keep, count)
        cached = sequence.cached_tokens or 0
        if not self._offers.finish(keep.key, cached):
            return
        assert self._channel is not None
        keep.answer = TransferAnswer(
            remote_block_ids=[sequence.table[:count]],
            remote_engine_id=self.engine_id,
            remote_request_id=keep.key,
            remote_host=self._channel.host,
            remote_port=self._channel.port,
            remote_num_tokens=sequence.prompt_tokens,
            remote_prefill_cached_tokens=cached,
            transfer_id=keep.transfer_id or UNSET,
        )

    def _publish(self, sequence: Sequence, keep: Keep, count: int) -> None:
        """Let peers have the first `count` blocks of the prompt."""
        if count <= keep.published:
            return
        names = sequence.content_ids
        if count > len(names) or count * self._size > sequence.prompt_tokens:
            prompt = sequence.tokens[: sequence.prompt_tokens]
            names = block_names(sequence.root, names, prompt, self._size)
        new = range(keep.published, count)
        kept = [KeptBlock(names[index], sequence.table[index]) for index in new]
        self._offers.publish(keep.key, kept, self._scheduler.pin)
        keep.published = count

    def _unpin(self, pins: list[list[int]]) -> None:
        def unpin() -> None:
            for pinned in pins:
                self._scheduler.unpin(pinned)

        self._post(unpin)

    def _settle(self, fetch: Fetch) -> None:
        """The peer's blocks are not needed, or not any more."""
        with self._lock:
            self._waiting.pop(fetch, None)
        if not fetch.begun:
            fetch.begun = True
            self._notify(partial(release, self._side, fetch.request))

    # ---- a pull's thread ----

    def _pull(self, fetch: Fetch, load: Load, names: list[bytes], blocks: list[int], done: Done) -> None:
        begun_s = time.monotonic()
        pulled = Pulled()
        give_way()
        try:
            pulled = pull(
                self._side,
                fetch.request,
                names,
                load.first_block,
                blocks,
                timeout_s=self.config.kv_connector_extra_config.kv_transfer_timeout,
                unwanted=lambda: load.abandoned or self._stopping.is_set(),
            )
        except Exception as cause:
            log.exception("a transfer failed")
            pulled.error = TransferError("bug", str(cause))
        self._book(fetch, load, pulled, time.monotonic() - begun_s)
        done([SOURCE] * pulled.good)

    def _book(self, fetch: Fetch, load: Load, pulled: Pulled, seconds: float) -> None:
        metrics = self.metrics
        if pulled.cached_tokens is not None:
            fetch.cached_tokens = pulled.cached_tokens
        metrics.pulled(pulled.transport, pulled.good, self._side.memory.block_bytes, seconds)
        if pulled.fell_back:
            metrics.not_shared.inc()
            if not self._told_fallback:
                self._told_fallback = True
                log.warning("no shared memory with %s: blocks come over TCP", fetch.request.host)
        with self._lock:
            self._waiting.pop(fetch, None)
        if not pulled.released:
            self._notify(partial(release, self._side, fetch.request))
        if pulled.error is None:
            return
        metrics.failure(pulled.error.reason)
        if pulled.error.reason == "corrupt":
            metrics.corrupt.inc()
        if load.abandoned:
            return
        log.warning("%d of %d blocks came: %s", pulled.good, len(load.blocks), pulled.error)
        if self.config.kv_load_failure_policy == "fail":
            self._post(partial(self._fail, load.sequence, f"its KV did not come: {pulled.error}"))

    # ---- notices ----

    def _notify(self, call: Callable[[], None]) -> None:
        if self._stopping.is_set():
            return
        if not self._notices.acquire(blocking=False):
            self.metrics.failed_notifications.inc()
            return
        try:
            self._notifiers.submit(self._tell, call)
        except RuntimeError:  # the engine stops: the lease will run out
            self._notices.release()

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except TransferError as error:
            self.metrics.failed_notifications.inc()
            log.debug("a peer was not told: %s", error)
        finally:
            self._notices.release()

    def _beat_all(self) -> None:
        every_s = self.config.kv_connector_extra_config.kv_lease_duration / _BEATS_A_LEASE
        while not self._stopping.wait(every_s):
            with self._lock:
                peers: dict[tuple[str, int], list[PullRequest]] = {}
                for fetch in self._waiting:
                    peers.setdefault((fetch.request.host, fetch.request.port), []).append(fetch.request)
                new = peers.keys() - self._beating
                self._beating |= new
            for address in new:
                self._notify(partial(self._beat, address, peers[address]))

    def _beat(self, address: tuple[str, int], requests: list[PullRequest]) -> None:
        try:
            anyone = msgspec.structs.replace(requests[0], engine_id=None)
            beat(self._side, anyone, [request.key for request in requests])
        finally:
            with self._lock:
                self._beating.discard(address)


class _Source:
    """Peers for those who bring blocks, `below` for everybody else."""

    def __init__(self, transfers: Transfers, below: KVSource | None) -> None:
        self._transfers = transfers
        self._below = below
        own_s = transfers.config.kv_connector_extra_config.kv_transfer_timeout + _MARGIN_S
        self.timeout_s = own_s if below is None else max(own_s, below.timeout_s)

    def look(self, sequence: Sequence) -> None:
        """See KVSource. Who brings blocks needs no others."""
        if self._below is not None and not isinstance(sequence.transfer, Fetch):
            self._below.look(sequence)

    def offer(self, sequence: Sequence, first_block: int) -> int:
        """See KVSource."""
        ticket = sequence.transfer
        if isinstance(ticket, Fetch) and not ticket.begun:
            return self._transfers.offered(sequence, ticket, first_block)
        return 0 if self._below is None else self._below.offer(sequence, first_block)

    def load(self, load: Load, done: Done) -> None:
        """See KVSource."""
        ticket = load.sequence.transfer
        if isinstance(ticket, Fetch) and not ticket.begun:
            self._transfers.fetch(ticket, load, done)
        else:
            assert self._below is not None
            self._below.load(load, done)


class _Sink:
    """Tells transfers of those who keep blocks, and `below` of everybody."""

    def __init__(self, transfers: Transfers, below: KVSink | None) -> None:
        self._transfers = transfers
        self._below = below

    def filled(self, sequence: Sequence, first_block: int) -> None:
        """See KVSink."""
        if isinstance(sequence.transfer, Keep):
            self._transfers.filled(sequence, sequence.transfer)
        if self._below is not None:
            self._below.filled(sequence, first_block)

    def ended(self, sequence: Sequence) -> None:
        """See KVSink."""
        if sequence.transfer is not None:
            self._transfers.ended(sequence)
        if self._below is not None:
            self._below.ended(sequence)
