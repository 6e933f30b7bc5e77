"""What the routing tests share: a shell in miniature, and an engine whose cache and events are known.

The engine is written from vLLM's rules, not from the router's code: physical blocks, copies of one hash, a
free list in order of use whose front is evicted, batches numbered from 0 with the process, a replay buffer.
"""

from collections import Counter, OrderedDict
from hashlib import blake2b

from hypothesis import settings
from xxhash import xxh3_64_intdigest

from sumibi.core.keys import extend_keys, root_key
from sumibi.core.kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    encode_batch,
)
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatch,
    Dispatched,
    EndpointUp,
    EngineBatch,
    Finished,
    FinishReason,
    FirstToken,
    Refuse,
    ReplayEnded,
)
from sumibi.routing.router import Router

REPEATABLE = settings(derandomize=True, deadline=None, database=None)
"""For property tests: the same examples every time; raise `max_examples` by hand to search."""

MODEL = "m"
BLOCK = 16


def prompt(name, tokens):
    """`tokens` token ids that depend on `name` from the first one on."""
    seed = xxh3_64_intdigest(str(name).encode())
    return [(seed + i * 7919) % 50_000 for i in range(tokens)]


def keys_of(token_ids, *, model=MODEL, salt="", block=BLOCK):
    """Routing keys of a prompt's full blocks."""
    return extend_keys(root_key(model, salt=salt), token_ids, block).tolist()


class Lab:
    """A router and a clock. Every event is followed by an integrity check (slow: long runs go without).

    Nothing is held back unless `hold_above_s` is given: most tests are about where requests go, not when.
    """

    def __init__(self, *, check=True, **config):
        self.recorded = []
        self._check = check
        self.router = Router(RouterConfig(**({"hold_above_s": None} | config)), observer=self.recorded.append)
        self.t = 0.0
        self.attempts = {}

    def tell(self, event_type, *, dt=0.0, **fields):
        self.t += dt
        instructions = self.router.handle(event_type(t=self.t, **fields))
        if self._check:
            self.router.check_integrity()
        for instruction in instructions:
            if isinstance(instruction, Dispatch):
                self.attempts[instruction.request] = instruction
            elif isinstance(instruction, Refuse):
                self.attempts.pop(instruction.request, None)
        return instructions

    def up(self, *names, **fields):
        fields = {"models": [MODEL], "engine_block_tokens": BLOCK} | fields
        return [i for name in names for i in self.tell(EndpointUp, endpoint=name, **fields)]

    def arrive(self, request, token_ids, **fields):
        keys = keys_of(token_ids, model=fields.get("model", MODEL))
        fields = {"model": MODEL, "keys": keys, "prompt_tokens": len(token_ids), "stream": True} | fields
        instructions = self.tell(Arrived, request=request, **fields)
        return instructions + self.tell(Admitted, request=request)

    def ask(self, request, token_ids, **fields):
        """Arrive, be placed, leave. Returns the endpoint, or the refusal, or None while it waits."""
        for instruction in self.arrive(request, token_ids, **fields):
            if isinstance(instruction, Dispatch):
                self.dispatched(request)
                return instruction.endpoint
            if isinstance(instruction, Refuse):
                return instruction
        return None

    def dispatched(self, request):
        attempt = self.attempts[request]
        self.tell(Dispatched, request=request, attempt=attempt.attempt, endpoint=attempt.endpoint)

    def first(self, request, *, dt=0.0):
        self.tell(FirstToken, dt=dt, request=request, attempt=self.attempts[request].attempt)

    def finish(self, request, reason=FinishReason.STOP, *, dt=0.0, answered=True, **fields):
        attempt = self.attempts[request].attempt if request in self.attempts else 0
        fields = {"request": request, "attempt": attempt, "reason": reason, "answered": answered} | fields
        return self.tell(Finished, dt=dt, **fields)

    def run(self, request, token_ids, *, prefill_s=0.0, decode_s=0.0, **usage):
        """A whole request, alone. Returns its endpoint."""
        endpoint = self.ask(request, token_ids)
        self.first(request, dt=prefill_s)
        self.finish(request, dt=decode_s, **usage)
        return endpoint

    def view(self, endpoint):
        return next(v for v in self.router.fleet_view() if v.endpoint == endpoint)

    def candidates(self, request):
        """The candidates of a request's last decision, by endpoint."""
        decision = next(d for d in reversed(self.router.decisions(1000)) if d.request == request)
        return {c.endpoint: c for c in decision.candidates}

    def batch(self, endpoint, batch, *, replayed=False, dt=0.0):
        payload = encode_batch(batch.ts, batch.events, batch.rank)
        digest = xxh3_64_intdigest(payload)
        return self.tell(EngineBatch, dt=dt, endpoint=endpoint, batch=batch, digest=digest, replayed=replayed)

    def replay(self, endpoint, engine, from_seq, *, ok=True):
        """Answer an `AskReplay` from the engine's buffer."""
        instructions = []
        for batch in engine.published:
            if batch.seq >= from_seq:
                instructions += self.batch(endpoint, batch, replayed=True)
        return instructions + self.tell(ReplayEnded, endpoint=endpoint, ok=ok)


class Engine:
    """A paged prefix cache that publishes what happens in it."""

    def __init__(self, blocks, *, block=BLOCK, process=0):
        self.block = block
        self.process = process
        self.published = []
        self._free = OrderedDict.fromkeys(range(blocks))
        self._hash = {}  # physical block -> hash
        self._copies = {}  # hash -> physical blocks, in order of computation
        self._users = Counter()  # physical block -> requests that use it
        self._events = []

    def hashes(self, token_ids):
        chain, parent = [], b""
        for start in range(0, len(token_ids) - self.block + 1, self.block):
            tokens = token_ids[start : start + self.block]
            parent = blake2b(parent + repr(tokens).encode(), digest_size=8).digest()
            chain.append((int.from_bytes(parent, "big"), tokens))
        return chain

    def begin(self, token_ids):
        """Allocate blocks for a prompt; (physical blocks, cached tokens), or None if there is no room.

        Blocks of running requests cannot be evicted or cleared (vLLM refuses a reset meanwhile).
        """
        chain = self.hashes(token_ids)
        # The last token is always computed, so a full last block is not reused either.
        usable = chain if len(token_ids) % self.block else chain[:-1]
        taken = []
        for name, _ in usable:
            if not self._copies.get(name):
                break
            taken.append(self._copies[name][0])
        needed = -(-len(token_ids) // self.block) - len(taken)
        if len([p for p in self._free if p not in taken]) < needed:
            return None
        for physical in taken:
            self._free.pop(physical, None)
            self._users[physical] += 1
        for _ in range(needed):
            physical, _ = self._free.popitem(last=False)
            name = self._hash.pop(physical, None)
            if name is not None:
                self._copies[name].remove(physical)
                self._events.append(BlockRemoved([name], medium="GPU", group_idx=0))
            self._users[physical] = 1
            taken.append(physical)
        return taken, (len(taken) - needed) * self.block

    def compute(self, token_ids, physical):
        """The prompt's full blocks are computed: announce those that are new in their place."""
        parent, run = None, []
        for (name, tokens), place in zip(self.hashes(token_ids), physical, strict=False):
            if self._hash.get(place) != name:
                self._hash[place] = name
                self._copies.setdefault(name, []).append(place)
                run.append((parent, name, tokens))
            parent = name
        if run:
            self._events.append(
                BlockStored(
                    block_hashes=[name for _, name, _ in run],
                    parent_block_hash=run[0][0],
                    token_ids=[token for _, _, tokens in run for token in tokens],
                    block_size=self.block,
                    medium="GPU",
                    group_idx=0,
                    kv_cache_spec_kind="full_attention",
                )
            )

    def end(self, physical):
        """The request is over: its blocks are free, the last one to be evicted first."""
        for place in reversed(physical):
            self._users[place] -= 1
            if not self._users[place]:
                self._free[place] = None

    def run(self, token_ids):
        """A whole prompt, alone. Returns cached tokens."""
        begun = self.begin(token_ids)
        assert begun is not None
        physical, cached = begun
        self.compute(token_ids, physical)
        self.end(physical)
        return cached

    def clear(self):
        self._hash.clear()
        self._copies.clear()
        self._events.append(AllBlocksCleared())

    def publish(self):
        """One batch of what happened since the last one."""
        seq = len(self.published)
        batch = EventBatch(seq=seq, ts=1000.0 * self.process + seq, events=self._events)
        self._events = []
        self.published.append(batch)
        return batch

    def held(self):
        """Hashes in the cache."""
        return {name for name, places in self._copies.items() if places}
