"""Two stands: the scheduler on a model without arithmetic, and a whole engine with the tiny model."""

import asyncio
import contextlib
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from zlib import crc32

import httpx
import pytest

from sumibi.core.content import content_root
from sumibi.engine.assembly import assemble
from sumibi.engine.blocks import BlockPool
from sumibi.engine.options import EngineOptions, KVEventsConfig
from sumibi.engine.scheduler import Scheduler
from sumibi.engine.sequence import SamplingParams, Sequence
from sumibi.engine.server import listen, serve

VOCABULARY = 50


def next_token(tokens):
    """What the fake model says after `tokens`: any function that depends on all of them."""
    return crc32(bytes(tokens)) % VOCABULARY


def continuation(prompt, count):
    """The oracle: `count` tokens after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeModel:
    """Keeps tokens where a model keeps KV, so that a wrong block shows as a wrong token."""

    def __init__(self, num_blocks, block_tokens):
        self.memory = [[None] * block_tokens for _ in range(num_blocks)]
        self.block_tokens = block_tokens

    def forward(self, batch):
        """One next token for each wanted position, rows as the real model orders them."""
        rows = []
        for step in batch.sequences:
            assert step.token_ids, "nothing to compute"
            for position, token in enumerate(step.token_ids, step.start):
                block, offset = divmod(position, self.block_tokens)
                self.memory[step.block_table[block]][offset] = token
            context = [token for block in step.block_table for token in self.memory[block]]
            rows += [next_token(context[: step.start + at + 1]) for at in step.logits_at]
        return rows

    def copy_blocks(self, pairs):
        for source, target in pairs:
            self.memory[target] = list(self.memory[source])


class Elsewhere:
    """A source that knows tokens by the content id of their block, and fills when the test says so."""

    timeout_s = 60.0

    def __init__(self, model):
        self.model = model
        self.blocks = {}
        self.begun = []

    def keep(self, tokens, content_ids):
        """Have the full blocks of `tokens`."""
        size = self.model.block_tokens
        for index, content_id in enumerate(content_ids):
            self.blocks[content_id] = tokens[index * size : (index + 1) * size]

    def look(self, sequence):
        """Nobody to ask."""

    def offer(self, sequence, first_block):
        """Whole blocks only."""
        count = 0
        for content_id in sequence.content_ids[first_block:]:
            if content_id not in self.blocks:
                break
            count += self.model.block_tokens
        return count

    def fill(self, load, good):
        """Write the first `good` blocks of a load, and rubbish into the others."""
        for index, (block, content_id) in enumerate(zip(load.blocks, load.content_ids, strict=False)):
            self.model.memory[block] = list(self.blocks[content_id]) if index < good else [VOCABULARY - 1] * 4
        return ["host"] * good


class Runner:
    """Scheduler and fake model, stepped by hand; checks the books after every step."""

    def __init__(
        self,
        *,
        num_blocks=64,
        block_tokens=4,
        max_sequences=8,
        step_tokens=16,
        max_tokens=None,
        outside=False,
        sink=None,
    ):
        self.pool = BlockPool(num_blocks, block_tokens)
        self.model = FakeModel(num_blocks, block_tokens)
        self.source = Elsewhere(self.model) if outside else None
        self.loads = []
        self.scheduler = Scheduler(
            self.pool,
            source=self.source,
            sink=sink,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
            max_tokens=max_tokens or num_blocks * block_tokens,
        )
        self.numbers = 0
        self.steps = 0

    def add(self, prompt, *, max_tokens=4, n=1, salt="", **params):
        """Queue a request; returns its sequences."""
        family = []
        for index in range(n):
            family.append(
                Sequence(
                    number=self.numbers,
                    prompt_tokens=len(prompt),
                    tokens=list(prompt),
                    params=SamplingParams(max_tokens=max_tokens, **params),
                    content_ids=[],
                    root=content_root("fake", salt=salt),
                    salt=salt,
                    index=index,
                )
            )
            self.numbers += 1
        family[0].siblings = family[1:]
        self.scheduler.add(family[0])
        return family

    def step(self):
        """One step; returns it, None if there was nothing to do."""
        step = self.scheduler.schedule()
        self.loads += self.scheduler.drain_loads()
        self.scheduler.check_integrity()
        if step is None:
            assert not self.scheduler.has_work or self.scheduler.loads
            return None
        batch = step.batch()
        assert batch.tokens <= self.scheduler.step_tokens
        rows = iter(self.model.forward(batch))
        tokens = []
        for part in step.parts:
            for _ in part.prompt_positions:
                next(rows)
            if part.samples:
                tokens += [next(rows)] * (1 + len(part.sequence.siblings))
        outcome = self.scheduler.account(step, tokens)
        self.model.copy_blocks(outcome.copies)
        self.scheduler.check_integrity()
        self.steps += 1
        return step

    def finish_load(self, at=0, good=None):
        """End load number `at`, with its first `good` blocks (None: all); returns what the scheduler says."""
        load = self.loads.pop(at)
        sources = self.source.fill(load, len(load.blocks) if good is None else good)
        tokens = self.scheduler.loaded(load, sources)
        self.scheduler.check_integrity()
        return tokens

    def run(self):
        """Step until idle; loads end one a step, whole."""
        while self.step() or self.loads:
            if self.loads:
                self.finish_load()


@pytest.fixture(scope="session")
def make_runner():
    return Runner


@pytest.fixture(scope="session")
def oracle():
    return continuation


class Served:
    """An engine in a thread of this process, on a port of its own."""

    def __init__(self, model="tiny", **options):
        kv_events = KVEventsConfig(
            enable_kv_cache_events=True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="kv@tiny"
        )
        defaults = {"dtype": "float32", "threads": 1, "enable_dev_mode": True, "shutdown_grace_s": 5}
        self._options = EngineOptions(model, port=0, kv_events=kv_events, **(defaults | options))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._ready = threading.Event()
        self.name = self._options.name
        self.exit_code = None

    async def _serve(self):
        self._loop = asyncio.get_running_loop()

        def ready(url):
            self.url = url
            self._ready.set()

        self.exit_code = await serve(
            self._options, self.door, self._publisher, self._listener, stop=self._stop, ready=ready
        )

    def __enter__(self):
        self._stop = asyncio.Event()
        self._listener = listen(self._options)
        self.door, self._publisher = assemble(self._options, on_failure=self._stop.set)
        self._thread.start()
        assert self._ready.wait(30)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *error):
        self.http.close()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def complete(self, prompt, headers=None, **fields):
        """A completion; returns the decoded answer."""
        body = {"model": self.name, "prompt": prompt, "temperature": 0, "return_token_ids": True, **fields}
        answer = self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def together(self, requests):
        """Token ids of several completions that are asked for at the same time."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(lambda fields: self.tokens(**fields), requests))

    def tokens(self, prompt, **fields):
        """The token ids of a completion's first choice."""
        return self.complete(prompt, **fields)["choices"][0]["token_ids"]

    def stream(self, path, **body):
        """The decoded events of a stream, `[DONE]` checked and left out."""
        with self.http.stream("POST", path, json={"model": self.name, "stream": True, **body}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    @contextlib.contextmanager
    def asking(self, **fields):
        """A completion is asked for on a connection that is closed at the end, whatever has come by then."""
        request = httpx.Request("POST", f"{self.url}/v1/completions", json={"model": self.name, **fields})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(request.content)}\r\n\r\n"
        with socket.create_connection((request.url.host, request.url.port)) as client:
            client.sendall(head.encode() + request.content)
            yield

    def metric(self, name):
        """The value of a metric that has one series."""
        page = self.http.get("/metrics").text
        (value,) = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        return float(value)


@pytest.fixture(scope="session")
def make_served():
    return Served


@pytest.fixture(scope="session")
def served():
    """One engine for all tests that change nothing of it but what is cached."""
    with Served() as engine:
        yield engine
