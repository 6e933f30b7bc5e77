"""What goes wrong between two engines costs time, never a wrong token, and leaves no block behind."""

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sumibi.engine.transfer import frames
from sumibi.engine.transfer.frames import Beat, Channel, Hello, Pull, Release, Taken, TransferError, Welcome

SEEDS = iter(range(101, 250))  # others than in test_pairs: engines are shared, caches too
TOKENS = 200
"""Of a prompt: seven blocks, the last partial."""
ASK = {"max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def both(make_served, make_config, make_pair):
    """Over TCP, so that bytes can be spoilt; D waits 1.5 s at most for its blocks."""
    with (
        make_served(kv_transfer=make_config()) as p,
        make_served(kv_transfer=make_config(transports=["tcp"], kv_transfer_timeout=1.5)) as d,
    ):
        yield make_pair(p, d)


@pytest.fixture(scope="module")
def hasty(make_served, make_config, both, make_pair):
    """P's leases last 0.8 s."""
    with make_served(kv_transfer=make_config(kv_lease_duration=0.8)) as p:
        yield make_pair(p, both.d)


@pytest.fixture
def token_ids(make_prompt):
    return make_prompt(next(SEEDS), TOKENS)


def counted(engine, name, **labels):
    """The sum of a metric's series that have these labels."""
    page = engine.http.get("/metrics").text
    total = 0.0
    for text, value in re.findall(rf"^{re.escape(name)}(?:{{([^}}]*)}})? (\S+)$", page, re.M):
        if all(f'{label}="{wanted}"' in text for label, wanted in labels.items()):
            total += float(value)
    return total


class Counts:
    """How much a counter has risen since this was made."""

    def __init__(self, engine, name, **labels):
        self._of = engine, f"{name}_total", labels
        self._before = self._now()

    def _now(self):
        engine, name, labels = self._of
        return counted(engine, name, **labels)

    @property
    def risen(self):
        return self._now() - self._before


def failures(engine, reason):
    return Counts(engine, "sumibi:kv_transfer_failures", reason=reason)


def chosen(answer):
    return answer["choices"][0]["token_ids"]


def through(proxy, params):
    return params | {"remote_host": "127.0.0.1", "remote_port": proxy.port}


def channel_to(engine, *, seconds=5.0):
    """A connection to an engine's side channel; the test speaks for a peer."""
    page = engine.door.engine.transfers.page
    connection = socket.create_connection((page.remote_host, page.remote_port))
    return Channel(connection, time.monotonic() + seconds)


def greeted(engine):
    """The same after the greeting."""
    channel = channel_to(engine)
    side = engine.door.engine.transfers._side
    channel.send(Hello(side.namespace, side.memory.block_bytes, None, None))
    assert channel.receive(Welcome).transport == "tcp"
    return channel


# ---- what the wire does ----


@pytest.mark.parametrize("at_block", [0, 3])
def test_a_flipped_bit_is_noticed_and_what_it_spoilt_computed(
    both, served, make_proxy, token_ids, eventually, at_block
):
    block_bytes = both.d.door.engine._model.block_bytes
    target = at_block * block_bytes + block_bytes // 2
    flipped = []

    def spoil(data, sent):
        if sent <= target < sent + len(data) and not flipped:
            flipped.append(target)
            spoilt = bytearray(data)
            spoilt[target - sent] ^= 1
            return bytes(spoilt)
        return data

    params = both.prefill(token_ids)["kv_transfer_params"]
    proxy = make_proxy(params["remote_host"], params["remote_port"], spoil)
    corrupt, why = Counts(both.d, "sumibi:kv_transfer_corrupt_blocks"), failures(both.d, "corrupt")
    failed = Counts(both.d, "vllm:nixl_num_failed_transfers")
    loaded = Counts(both.d, "sumibi:kv_load_tokens")
    answer = both.decode(token_ids, through(proxy, params), **ASK)
    assert flipped
    assert chosen(answer) == served.tokens(token_ids, **ASK)
    assert corrupt.risen == why.risen == failed.risen == 1
    assert loaded.risen == at_block * 32  # those before it are good
    both.idle()


def test_a_connection_that_breaks_in_the_middle(both, served, make_proxy, token_ids):
    block_bytes = both.d.door.engine._model.block_bytes

    def spoil(data, sent):
        if sent + len(data) > 2.5 * block_bytes:
            raise OSError("cut")
        return data

    params = both.prefill(token_ids)["kv_transfer_params"]
    proxy = make_proxy(params["remote_host"], params["remote_port"], spoil)
    why, loaded = failures(both.d, "connection"), Counts(both.d, "sumibi:kv_load_tokens")
    answer = both.decode(token_ids, through(proxy, params), **ASK)
    assert chosen(answer) == served.tokens(token_ids, **ASK)
    assert (why.risen, loaded.risen) == (1, 64)
    # D's release goes through the same proxy, which lets nothing more pass: P is told here.
    tell(both.p, params["remote_request_id"])
    both.idle()


def tell(engine, key):
    """Release a request's blocks, as a peer does."""
    channel = greeted(engine)
    with channel.socket:
        channel.send(Release(key))
        channel.receive(frames.End)


def test_a_prefill_engine_that_has_gone(both, served, make_served, make_config, make_pair, token_ids):
    with make_served(kv_transfer=make_config()) as p:
        params = make_pair(p, both.d).prefill(token_ids)["kv_transfer_params"]
    why = failures(both.d, "unreachable")
    assert chosen(both.decode(token_ids, params, **ASK)) == served.tokens(token_ids, **ASK)
    assert why.risen == 1
    both.idle()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, ".."])
def test_a_host_that_is_none(both, served, token_ids, host, caplog):
    params = both.prefill(token_ids)["kv_transfer_params"]
    why = failures(both.d, "unreachable")
    answer = both.decode(token_ids, params | {"remote_host": host}, **ASK)
    assert chosen(answer) == served.tokens(token_ids, **ASK)
    assert why.risen == 1
    assert not [record for record in caplog.records if record.exc_info]
    tell(both.p, params["remote_request_id"])
    both.idle()


def test_a_peer_that_takes_connections_and_says_nothing(both, served, token_ids):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        params = both.prefill(token_ids)["kv_transfer_params"]
        why, begun_s = failures(both.d, "timeout"), time.monotonic()
        silent = params | {"remote_port": mute.getsockname()[1]}
        assert chosen(both.decode(token_ids, silent, **ASK)) == served.tokens(token_ids, **ASK)
        assert 1.4 < time.monotonic() - begun_s < 5
        assert why.risen == 1
    tell(both.p, params["remote_request_id"])
    both.idle()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"),
        # {"reason": "xyz", "text": ""}: whatever a peer makes up is one label
        (b"SKVT\x01\x02\x00\x00\x00\x12\x82\xa6reason\xa3xyz\xa4text\xa0", "refused"),
    ],
)
def test_a_peer_that_answers_rubbish(both, served, token_ids, words, reason):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def babble():
            connection, _ = server.accept()
            with connection:
                connection.sendall(words)
                connection.recv(1 << 16)

        babbler = threading.Thread(target=babble)
        babbler.start()
        params = both.prefill(token_ids)["kv_transfer_params"]
        why = failures(both.d, reason)
        wrong = params | {"remote_port": server.getsockname()[1]}
        assert chosen(both.decode(token_ids, wrong, **ASK)) == served.tokens(token_ids, **ASK)
        assert why.risen == 1
        babbler.join(5)
    tell(both.p, params["remote_request_id"])
    both.idle()


# ---- what the prefill side has not, or not any more ----


def test_leases_end_and_who_comes_late_computes(hasty, served, token_ids, eventually):
    expired = Counts(hasty.p, "vllm:nixl_num_kv_expired_reqs")
    params = hasty.prefill(token_ids)["kv_transfer_params"]
    pool = hasty.p.door.engine._scheduler.pool
    assert pool.held == 7
    eventually(lambda: pool.held == 0, 3)
    assert expired.risen == 1
    why = failures(hasty.d, "expired")
    assert chosen(hasty.decode(token_ids, params, **ASK)) == served.tokens(token_ids, **ASK)
    assert why.risen == 1
    hasty.idle()


def test_signs_of_life_keep_a_lease(hasty, token_ids, eventually):
    expired = Counts(hasty.p, "vllm:nixl_num_kv_expired_reqs")
    params = hasty.prefill(token_ids)["kv_transfer_params"]
    channel = greeted(hasty.p)
    with channel.socket:
        for _ in range(10):  # 1 s: longer than the lease
            channel.send(Beat([params["remote_request_id"], "somebody-else"]))
            channel.receive(frames.End)
            time.sleep(0.1)
        assert hasty.p.door.engine._scheduler.pool.held == 7
    eventually(lambda: expired.risen == 1, 3)
    hasty.idle()


def test_a_request_that_is_not_known(both, served, token_ids):
    params = both.prefill(token_ids)["kv_transfer_params"]
    why = failures(both.d, "unknown")
    answer = both.decode(token_ids, params | {"remote_request_id": "cmpl-nobody"}, **ASK)
    assert chosen(answer) == served.tokens(token_ids, **ASK)
    assert why.risen == 1
    tell(both.p, params["remote_request_id"])
    both.idle()


def test_another_prompt_than_the_prefill_engine_computed(both, served, make_prompt, token_ids):
    params = both.prefill(token_ids)["kv_transfer_params"]
    other = token_ids[:40] + make_prompt(next(SEEDS), 160)
    why, loaded = failures(both.d, "content"), Counts(both.d, "sumibi:kv_load_tokens")
    assert chosen(both.decode(other, params, **ASK)) == served.tokens(other, **ASK)
    assert (why.risen, loaded.risen) == (1, 32)
    both.idle()


@pytest.mark.parametrize(("cached", "told", "comes"), [(0, 40, 32), (96, 32, 0), (0, 200, 199)])
def test_another_number_of_tokens_than_there_is(both, served, token_ids, cached, told, comes):
    if cached:
        both.d.complete(token_ids[: cached + 1], max_tokens=1)
    params = both.prefill(token_ids)["kv_transfer_params"]
    loaded = Counts(both.d, "sumibi:kv_load_tokens")
    answer = both.decode(token_ids, params | {"remote_num_tokens": told}, **ASK)
    assert chosen(answer) == served.tokens(token_ids, **ASK)
    assert loaded.risen == comes
    both.idle()


def test_another_life_of_the_engine(both, served, token_ids):
    params = both.prefill(token_ids)["kv_transfer_params"]
    why = failures(both.d, "engine")
    answer = both.decode(token_ids, params | {"remote_engine_id": "0" * 32}, **ASK)
    assert chosen(answer) == served.tokens(token_ids, **ASK)
    assert why.risen == 1
    tell(both.p, params["remote_request_id"])
    both.idle()


def test_blocks_of_another_dtype_are_refused(hasty, make_served, make_config, make_pair, token_ids):
    with make_served(dtype="bfloat16", kv_transfer=make_config()) as d:
        alone = d.tokens(token_ids, **ASK, cache_salt="alone")
        mixed = make_pair(hasty.p, d)
        params = hasty.prefill(token_ids)["kv_transfer_params"]
        why, loaded = failures(d, "namespace"), Counts(d, "sumibi:kv_load_tokens")
        assert chosen(mixed.decode(token_ids, params, **ASK)) == alone
        assert (why.risen, loaded.risen) == (1, 0)
        mixed.idle()  # by its lease: no word of this D counts at P


def test_stream_with_a_prefill_engine_that_is_never_asked(both, served, token_ids):
    page = both.p.http.get("/kv_transfer").json()
    pull = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "xfer-nobody",
        "remote_host": page["remote_host"],
        "remote_port": page["remote_port"],
    }
    why, begun_s = failures(both.d, "timeout"), time.monotonic()
    unknown = failures(both.d, "unknown")
    assert chosen(both.decode(token_ids, pull, **ASK)) == served.tokens(token_ids, **ASK)
    assert 1.4 < time.monotonic() - begun_s < 5
    assert why.risen + unknown.risen == 1
    both.idle()
    # P is asked after all, much too late: nobody will come for it, and P knows.
    late = both.p.complete(
        token_ids, max_tokens=1, kv_transfer_params={"do_remote_decode": True, "transfer_id": "xfer-nobody"}
    )
    assert "kv_transfer_params" not in late
    both.idle()


def test_fail_is_an_error_that_says_why(both, make_served, make_config, make_pair, token_ids):
    with make_served(kv_transfer=make_config(policy="fail", transports=["tcp"])) as d:
        strict = make_pair(both.p, d)
        params = strict.prefill(token_ids)["kv_transfer_params"] | {"remote_request_id": "cmpl-nobody"}
        answer = d.http.post(
            "/v1/completions",
            json={"model": d.name, "prompt": token_ids, "kv_transfer_params": params, **ASK},
        )
        assert answer.status_code == 503
        assert "KV did not come" in answer.json()["error"]["message"]
        assert "cmpl-nobody" in answer.json()["error"]["message"]
        tell(both.p, only_key(both.p))
        strict.idle()
        # The engine goes on, and a transfer that works works.
        assert len(chosen(strict.serial(token_ids, **ASK))) == 8
        strict.idle()


def only_key(engine):
    """The one request whose blocks an engine keeps."""
    (key,) = engine.door.engine.transfers._offers._offers
    return key


# ---- who goes away ----


def test_a_client_that_leaves_while_blocks_come(both, make_proxy, token_ids, eventually):
    begun, go_on = threading.Event(), threading.Event()

    def spoil(data, sent):
        if sent > 4096 and not begun.is_set():
            begun.set()
            go_on.wait(5)
        return data

    params = both.prefill(token_ids)["kv_transfer_params"]
    proxy = make_proxy(params["remote_host"], params["remote_port"], spoil)
    with both.d.asking(prompt=token_ids, kv_transfer_params=through(proxy, params), **ASK):
        assert begun.wait(5)
        assert len(both.d.door.engine._scheduler.loads) == 1
    try:
        both.idle()  # while the wire is still held up: nobody waits for it
    finally:
        go_on.set()


def test_a_client_that_leaves_the_prefill_side(both, make_prompt):
    token_ids = make_prompt(next(SEEDS), 1500)
    keep = {"do_remote_decode": True, "transfer_id": "xfer-left"}
    with both.p.asking(prompt=token_ids, kv_transfer_params=keep, max_tokens=200, ignore_eos=True):
        offers = both.p.door.engine.transfers._offers
        deadline_s = time.monotonic() + 5
        while not len(offers):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
    both.idle()


# ---- what comes in from outside ----

GOOD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "remote_num_tokens": 3,
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"remote_host": None}, "remote_host"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_host": 7}, "remote_host"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_port": 70000}, "remote_port"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_request_id": None}, "remote_request_id"),
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_block_ids": [1]}, "remote_block_ids"),
        ({"remote_num_tokens": None}, "remote_num_tokens"),
        ({"remote_num_tokens": 0}, "remote_num_tokens"),
        ({"remote_num_tokens": 4}, "remote_num_tokens"),
        ({"remote_num_tokens": 10**9}, "remote_num_tokens"),
        ({"remote_num_tokens": 10**30}, "remote_num_tokens"),
        ({"remote_prefill_cached_tokens": 61}, "remote_prefill_cached_tokens"),
        ({"remote_host": "h" * 300}, "remote_host"),
        ({"transfer_id": {"a": [1]}}, "transfer_id"),
        ({"tp_size": 2}, "tp_size"),
        ({"do_remote_decode": True}, "do_remote_prefill"),
        ({"do_remote_prefill": "yes"}, "do_remote_prefill"),
    ],
)
def test_bad_parameters_are_named(both, changes, field):
    body = {"model": both.d.name, "prompt": [5, 6, 7], "kv_transfer_params": GOOD | changes, **ASK}
    answer = both.d.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == f"kv_transfer_params.{field}"
    assert error["message"].startswith(f"kv_transfer_params.{field}: ")
    value = changes.get(field)
    if value is not None:
        assert json.dumps(value, separators=(",", ":"))[:100] in error["message"]
    assert len(error["message"]) < 250


@pytest.mark.parametrize("params", [7, "pull", [GOOD]])
def test_parameters_that_are_no_object(both, params):
    body = {"model": both.d.name, "prompt": [5, 6, 7], "kv_transfer_params": params, **ASK}
    answer = both.d.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "kv_transfer_params" in answer.json()["error"]["message"]


def test_a_transfer_id_is_used_once(both, token_ids):
    keep = {"do_remote_decode": True, "transfer_id": "xfer-once"}
    both.p.complete(token_ids, max_tokens=1, kv_transfer_params=keep)
    again = {"model": both.p.name, "prompt": token_ids, "max_tokens": 1, "kv_transfer_params": keep}
    for _ in range(2):  # while the blocks are kept, and after
        answer = both.p.http.post("/v1/completions", json=again)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "kv_transfer_params.transfer_id"
        tell(both.p, "xfer-once")
    both.idle()


def frame(kind, body, *, magic=b"SKVT", version=1, length=None):
    return magic + bytes([version, kind]) + (len(body) if length is None else length).to_bytes(4) + body


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        bytes(range(256)) * 16,
        frame(0, b"\xc1" * 8),
        frame(0, b"\xa3\xff\xfe\xfd"),  # text that is none
        frame(0, b"\x91" * 4000),  # lists in lists
        frame(0, b"", version=2),
        frame(99, b""),
        frame(0, b"", length=(1 << 32) - 1),
        frame(8, b"\x81\xaccached_tokens\xc0"),  # before the greeting
    ],
)
def test_rubbish_at_the_side_channel_ends_its_connection_only(
    both, served, token_ids, data, eventually, caplog
):
    bad = Counts(both.p, "sumibi:kv_transfer_bad_connections")
    params = both.prefill(token_ids)["kv_transfer_params"]
    channel = channel_to(both.p)
    with channel.socket:
        channel.socket.sendall(data)
        channel.socket.settimeout(5)
        try:
            assert channel.socket.recv(1) == b""
        except ConnectionResetError:
            pass  # closed with bytes unread
    eventually(lambda: bad.risen == 1)
    assert not [record for record in caplog.records if record.exc_info]
    assert chosen(both.decode(token_ids, params, **ASK)) == served.tokens(token_ids, **ASK)
    both.idle()


@pytest.mark.parametrize("wait_s", [0.0, -1.0, float("nan")])
def test_a_pull_for_a_request_that_is_not_known_is_answered(both, wait_s):
    channel = greeted(both.p)
    with channel.socket:
        channel.send(Pull("cmpl-nobody", 0, [b"x" * 16], wait_s))
        with pytest.raises(TransferError, match="cmpl-nobody") as raised:
            channel.receive(frames.Block)
    assert raised.value.reason == "unknown"


@pytest.mark.parametrize("first", [-1, 2, 1 << 40])
def test_blocks_that_a_request_does_not_have(both, make_prompt, first):
    key = both.prefill(make_prompt(next(SEEDS), 64))["kv_transfer_params"]["remote_request_id"]
    channel = greeted(both.p)
    with channel.socket:
        channel.send(Taken(5))  # means nothing here
        channel.send(Pull(key, first, [b"x" * 16], 0.0))
        with pytest.raises(TransferError) as raised:
            channel.receive(frames.Block)
        assert raised.value.reason == "content"
    tell(both.p, key)
    both.idle()


def test_many_pairs_while_rubbish_comes_in(both, served, make_prompt):
    prompts = [make_prompt(next(SEEDS), 50 + 30 * number) for number in range(6)]
    address = both.p.door.engine.transfers.page.remote_host, both.p.door.engine.transfers.page.remote_port
    over = threading.Event()

    def noise():
        while not over.is_set():
            with socket.create_connection(address) as connection:
                connection.sendall(b"rubbish" * 10)
            time.sleep(0.01)

    noisy = threading.Thread(target=noise)
    noisy.start()
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda token_ids: both.serial(token_ids, **ASK), prompts))
    finally:
        over.set()
        noisy.join(5)
    for token_ids, answer in zip(prompts, answers, strict=True):
        assert chosen(answer) == served.tokens(token_ids, **ASK)
    both.idle()
