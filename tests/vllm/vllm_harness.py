"""Real vLLM servers as child processes, a gateway in a thread, and what an engine says it has cached.

Nothing here knows of a particular test. Servers listen on the loopback interface, each leads a process
group of its own, is stopped by its id, and leaves its log in `out/vllm/`.
"""

import asyncio
import hashlib
import json
import os
import pickle
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import uvloop
import zmq

from sumibi.core.keys import extend_keys, root_key
from sumibi.gateway.main import Gateway
from sumibi.gateway.options import GatewayOptions, Timeouts

MODEL = "smollm2"
BLOCK = 32
"""The smallest block that vLLM's CPU attention takes, and the router's default."""
START_S = 600.0
"""A start takes 20 s on two idle cores, minutes on busy ones."""
REPOSITORY = Path(__file__).resolve().parents[2]
Answer = TypeVar("Answer")


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Wait until `condition` holds; fail after a while, saying `what` did not come true."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


class VllmEnvironment:
    """Where vLLM is installed. Raises RuntimeError, naming the cure, if it is not."""

    def __init__(self) -> None:
        root = Path(os.environ.get("VLLM_VENV", REPOSITORY / ".vllm")).resolve()
        self.python = root / "bin" / "python"
        self.preload = root / "lib" / "libiomp5.so"
        if not self.python.exists() or not next(root.glob("lib/python*/site-packages/vllm"), None):
            raise RuntimeError(f"there is no vLLM in {root}: run `make vllm`")

    def variables(self, cores: str) -> dict[str, str]:
        """Of a server that computes on `cores`, with nothing fetched and nothing reported."""
        return {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOOPBACK_IP": "127.0.0.1",
            "VLLM_SERVER_DEV_MODE": "1",
            **({"LD_PRELOAD": str(self.preload)} if self.preload.exists() else {}),
        }


@dataclass
class Engine:
    """One vLLM server."""

    name: str
    port: int
    command: list[str]
    variables: dict[str, str]
    log: Path
    events: str = ""
    """Address of its publisher as it was told; empty: none."""
    replay: str = ""
    process: "subprocess.Popen[bytes] | None" = None
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=300.0))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoint(self) -> str:
        """Its canonical id."""
        return f"{self.url}#0"

    def start(self) -> None:
        """Start it; `wait_ready` tells when it answers."""
        assert self.process is None, f"{self.name} runs already"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> "Engine":
        """Until it is well. Fails with the end of its log if it ends, or takes too long."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self._log_end()}")
            with suppress(httpx.HTTPError):
                if self.client.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    return self
            time.sleep(0.5)
        raise AssertionError(f"{self.name} was not ready in {START_S:.0f} s:\n{self._log_end()}")

    def stop(self) -> None:
        """SIGTERM to the server, and an end to what is left of its group after a while."""
        if self.process is not None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30.0)
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, at once."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30.0)
            self.process = None

    def ask(self, path: str, body: object = None, **params: Any) -> Any:
        """GET, or POST a JSON body; the answer's JSON. Fails on any status but 200."""
        reply = self.send(path, body, **params)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:500]}"
        return reply.json() if reply.content else None

    def send(self, path: str, body: object = None, **params: Any) -> httpx.Response:
        """The same, with whatever the answer is."""
        if body is None:
            return self.client.get(self.url + path, params=params)
        return self.client.post(self.url + path, json=body, params=params)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = 0.0
        for line in self.client.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(label in line for label in wanted):
                found += float(line.rsplit(" ", 1)[1])
        return found

    def reset_cache(self) -> None:
        """Empty its device cache, and take a step, in which it announces that."""

        def emptied() -> bool:
            return bool(self.send("/reset_prefix_cache", {}).json()["success"])

        eventually(emptied, f"{self.name} lets go of its blocks")
        self.ask("/v1/completions", {"model": MODEL, "prompt": [504], "max_tokens": 1})

    def _log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])


class EngineCache:
    """What an engine has cached, by its own account: every batch since its start, tallied. Without more said
    it is about the device; what lies below is in `below`.

    An oracle, so it shares no code with the product: the replay protocol and msgpack are read here anew, and
    the rules are vLLM's. Each stored event adds one physical copy, each removed one takes one, a clear takes
    all. A block is known by the tokens from the prompt's start to its end, and by the salt.
    """

    def __init__(self, engine: Engine) -> None:
        self.copies: Counter[int] = Counter()
        self.below: dict[str, Counter[int]] = {}
        """Copies in each other medium."""
        self.chains: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Of each block ever stored: its salt, and all tokens up to its end."""
        self.last = -1
        """Sequence of the newest batch."""
        self.removed = self.cleared = self.stored = 0
        for seq, payload in _replayed(engine.replay):
            assert seq == self.last + 1, f"{engine.name}'s batches begin at {seq} after {self.last}"
            self.last = seq
            for event in msgspec.msgpack.decode(payload)[1]:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
            self.cleared += 1
            return
        medium = event["medium"]
        copies = self.copies if medium == "GPU" else self.below.setdefault(medium, Counter())
        if event["type"] == "BlockRemoved":
            self.removed += len(event["block_hashes"]) if medium == "GPU" else 0
            for block in event["block_hashes"]:
                assert copies[block] > 0, "a block was removed that was not there"
                copies[block] -= 1
        else:
            assert (event["type"], event["block_size"]) == ("BlockStored", BLOCK)
            self._stored(event, copies)

    def _stored(self, event: dict[str, Any], copies: Counter[int]) -> None:
        parent = event["parent_block_hash"]
        extras = (event.get("extra_keys") or [None])[0]
        salt, tokens = (extras[-1] if extras else "", ()) if parent is None else self.chains[parent]
        for i, block in enumerate(event["block_hashes"]):
            tokens = (*tokens, *event["token_ids"][i * BLOCK : (i + 1) * BLOCK])
            self.chains[block] = salt, tokens
            copies[block] += 1
            self.stored += 1

    @property
    def blocks(self) -> set[int]:
        """Those with a copy left, by the engine's own names."""
        return {block for block, copies in self.copies.items() if copies}

    def keys(self, medium: str = "GPU") -> set[int]:
        """The same blocks, or those of another medium, by routing key, of the model's name."""
        copies = self.copies if medium == "GPU" else self.below.get(medium, Counter())
        return {
            extend_keys(root_key(MODEL, salt=salt), tokens, BLOCK)[-1]
            for salt, tokens in (self.chains[block] for block in copies if copies[block])
        }

    def check_names(self) -> None:
        """Each block's name is what vLLM's rule makes of its chain, so the chains were read right."""
        by_chain: dict[tuple[str, tuple[int, ...]], bytes] = {}
        start = _sha256("vllm-none-hash")
        for block, (salt, tokens) in self.chains.items():
            parent = by_chain.get((salt, tokens[:-BLOCK]), start)
            extra = (("cache_salt", salt),) if salt and len(tokens) == BLOCK else None
            name = by_chain[salt, tokens] = _sha256((parent, tokens[-BLOCK:], extra))
            assert int.from_bytes(name[-8:], "big") == block


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _replayed(address: str) -> Iterator[tuple[int, bytes]]:
    """(sequence, payload) of every batch that the engine still has, from its first."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = 10_000
        socket.connect(address)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            *_, seq, payload = socket.recv_multipart()
            number = int.from_bytes(seq, "big", signed=True)
            if number < 0:
                return
            yield number, payload


class GatewayThread:
    """The gateway of `sumibi serve` on a loop in a thread, so that a test may look into its router."""

    def __init__(self, options: GatewayOptions) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gateway")
        self._thread.start()
        self.gateway = self._wait(self._start(options))
        self.client = httpx.Client(timeout=300.0, limits=httpx.Limits(max_connections=64))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.server.port}"

    def look(self, question: Callable[[Gateway], Answer]) -> Answer:
        """What `question` says of the gateway, asked in its thread."""

        async def asked() -> Answer:
            return question(self.gateway)

        return self._wait(asked())

    def ask(self, path: str, body: object) -> Any:
        """POST to the door; the answer's JSON. Fails on any status but 200."""
        reply = self.client.post(self.url + path, json=body)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text[:500]}"
        return reply.json()

    def view(self, engine: Engine) -> Any:
        """The router's view of an engine."""
        views = self.look(lambda gateway: gateway.router.fleet_view())
        return next(view for view in views if view.endpoint == engine.endpoint)

    def wait_exact(self, *engines: Engine) -> None:
        """Until it follows these engines' events and knows their caches exactly."""

        wanted = {(engine.endpoint, True, "exact") for engine in engines}

        def exact() -> bool:
            views = self.look(lambda gateway: gateway.router.fleet_view())
            return wanted <= {(view.endpoint, view.up, view.grade) for view in views}

        eventually(exact, "the gateway knows the engines' caches exactly", timeout_s=120.0)

    def known_below(self, engine: Engine, medium: str) -> set[int]:
        """Routing keys of the blocks that the index says are in this medium of an engine."""

        def read(gateway: Gateway) -> set[int]:
            index = gateway.router._index
            feed = gateway.router._fleet.endpoints[engine.endpoint].feed
            assert feed is not None
            holder = feed.tiers.get(medium.lower())
            return set() if holder is None else {key for key in index._at if index.holds(holder, key)}

        return self.look(read)

    def known_keys(self, engine: Engine) -> set[int]:
        """Routing keys of the blocks that the index says are in an engine's device cache."""

        def read(gateway: Gateway) -> set[int]:
            index = gateway.router._index
            endpoint = gateway.router._fleet.endpoints[engine.endpoint]
            assert endpoint.feed is not None
            held = {key for key in index._at if index.holds(endpoint.feed.device, key)}
            assert endpoint.resident_blocks() == len(held), "blocks are believed beyond what events say"
            return held

        return self.look(read)

    def settle(self, engine: Engine) -> EngineCache:
        """Wait until the gateway has taken the last batch that the engine published; the engine's cache."""
        quiet: list[EngineCache] = []

        def settled() -> bool:
            cache = EngineCache(engine)
            if quiet and quiet[-1].last == cache.last == self.view(engine).last_sequence:
                return True
            quiet.append(cache)
            time.sleep(0.3)
            return False

        eventually(settled, f"the gateway hears all that {engine.name} says")
        return quiet[-1]

    def check_empty(self) -> None:
        """Nothing is in flight: the ledger and the engines' loads are zero and consistent."""

        def look(gateway: Gateway) -> None:
            gateway.router.check_integrity()
            assert not gateway.shell.completions
            for view in gateway.router.fleet_view():
                load = (view.inflight, view.prefilling, view.decoding, view.prefill_tokens)
                assert load == (0, 0, 0, 0), view

        eventually(lambda: not self.look(lambda gateway: gateway.shell.completions), "requests end")
        self.look(look)

    def close(self) -> None:
        """Stop it, once."""
        if self._loop.is_closed():
            return
        self.client.close()
        self._wait(self.gateway.stop(5.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    async def _start(self, options: GatewayOptions) -> Gateway:
        gateway = Gateway(options)
        await gateway.start()
        return gateway

    def _wait(self, coroutine: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(120.0)


def timeouts() -> Timeouts:
    """Generous: two engines on two cores that other work may share."""
    return Timeouts(first_byte_s=280.0, between_bytes_s=280.0)


_VOCABULARY = """
cache block engine token prompt answer question tool result file line error test build route queue
memory disk network server client request reply session agent model layer weight batch step start
end left right open close read write find move copy list table index name value time second minute
hour red green blue black white north south east west river stone wood fire water
"""
_WORDS = tuple(_VOCABULARY.split())


def words(names: Sequence[object]) -> str:
    """Text that is a function of `names`, one word each, about a token a word."""
    return " ".join(
        _WORDS[hashlib.sha256(json.dumps([*map(str, names[:8]), i, name]).encode()).digest()[0] % len(_WORDS)]
        for i, name in enumerate(map(str, names))
    )
