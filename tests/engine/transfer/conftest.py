"""Two engines in this process, on real sockets, and what a gateway would send to them."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sumibi.engine.transfer.config import KVTransferConfig, TransferExtra

KEEP = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def config(role="kv_both", policy="recompute", **extra):
    extra = {"kv_lease_duration": 20.0, "kv_transfer_timeout": 10.0} | extra
    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config=TransferExtra(**extra),
    )


def prompt(seed, tokens):
    """Token ids that differ from the first on by `seed`."""
    return [(seed * 7919 + position * 31 + position * position) % 250 + 3 for position in range(tokens)]


class Pair:
    """A prefill and a decode engine; `p`, `d` are `Served`."""

    def __init__(self, p, d):
        self.p, self.d = p, d

    def prefill(self, token_ids, **params):
        """P's leg; returns P's whole answer."""
        return self.p.complete(token_ids, max_tokens=1, kv_transfer_params=KEEP | params)

    def decode(self, token_ids, params, **fields):
        """D's leg; returns D's whole answer."""
        return self.d.complete(token_ids, kv_transfer_params=params, **fields)

    def serial(self, token_ids, **fields):
        """As `nixlv2`: prefill, wait, decode."""
        return self.decode(token_ids, self.prefill(token_ids)["kv_transfer_params"], **fields)

    def stream(self, token_ids, transfer_id, *, decode_first=True, **fields):
        """As `stream`: both at once; returns D's answer."""
        page = self.p.http.get("/kv_transfer").json()
        pull = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_engine_id": page["engine_id"],
            "remote_host": page["remote_host"],
            "remote_port": page["remote_port"],
        }
        keep = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        with ThreadPoolExecutor(2) as pool:
            legs = [
                lambda: self.decode(token_ids, pull, **fields),
                lambda: self.p.complete(token_ids, max_tokens=1, kv_transfer_params=keep),
            ]
            first, second = legs if decode_first else legs[::-1]
            a = pool.submit(first)
            time.sleep(0.05)
            b = pool.submit(second)
            answers = [a.result(), b.result()]
        return answers[0 if decode_first else 1]

    def idle(self, within_s=5.0):
        """Wait until nobody holds a block on either side, and check the books of both."""
        for engine in (self.p, self.d):
            inside = engine.door.engine
            # An abort may not have reached the step thread yet, and with it what was promised to a peer.
            wait_until(lambda inside=inside: len(inside.transfers._offers) == 0, within_s)
            wait_until(lambda engine=engine: held(engine) == 0, within_s)
            inside._scheduler.check_integrity()
            assert inside._scheduler.loads == []


def held(engine):
    return engine.door.engine._scheduler.pool.held


def wait_until(condition, within_s=5.0):
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about in time"
        time.sleep(0.01)


@pytest.fixture(scope="session")
def make_config():
    return config


@pytest.fixture(scope="session")
def make_prompt():
    return prompt


@pytest.fixture(scope="session")
def make_pair():
    return Pair


@pytest.fixture(scope="session")
def eventually():
    return wait_until


@pytest.fixture(scope="session")
def pair(make_served):
    """Prefill and decode with the tiny model, float32; shared memory is asked for."""
    with make_served(kv_transfer=config()) as p, make_served(kv_transfer=config()) as d:
        yield Pair(p, d)


class Proxy:
    """A TCP proxy before a side channel. `spoil(data, sent)` may alter or withhold what the peer sends."""

    def __init__(self, host, port, spoil):
        self._target = (host, port)
        self._spoil = spoil
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                threading.Thread(target=self._copy, args=(client, server, None), daemon=True).start()
                threading.Thread(target=self._copy, args=(server, client, self._spoil), daemon=True).start()

    def _copy(self, source, target, spoil):
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                if spoil is not None:
                    data = spoil(data, self.sent)
                    self.sent += len(data)
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
def make_proxy():
    made = []

    def make(host, port, spoil):
        made.append(Proxy(host, port, spoil))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()
