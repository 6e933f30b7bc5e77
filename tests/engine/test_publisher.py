"""KV events over real sockets: a subscriber must end up knowing exactly what the pool holds."""

import random
import time

import pytest
import zmq

from sumibi.core.errors import EnvironmentProblem
from sumibi.core.kvevents import REPLAY_END, AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from sumibi.engine.blocks import wire_hash
from sumibi.engine.options import KVEventsConfig
from sumibi.engine.publisher import ZmqPublisher, bind_address, binds


@pytest.fixture
def sockets():
    """Makes sockets that end with the test."""
    context, made = zmq.Context(), []

    def make(kind):
        made.append(context.socket(kind))
        return made[-1]

    yield make
    for socket in made:
        socket.close(linger=0)
    context.term()


@pytest.fixture
def publisher():
    """Makes publishers on free ports that end with the test."""
    made = []

    def make(**fields):
        config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
        made.append(ZmqPublisher(KVEventsConfig(**config | fields), host="127.0.0.1"))
        return made[-1]

    yield make
    for source in made:
        source.stop()


def local(endpoint):
    return endpoint.replace("*", "127.0.0.1")


def ask_replay(sockets, endpoint, first):
    """All batches from `first` on, up to the end mark."""
    dealer = sockets(zmq.DEALER)
    dealer.connect(local(endpoint))
    dealer.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while dealer.poll(5000):
        empty, topic, number, payload = dealer.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big") == REPLAY_END:
            assert (topic, payload) == (b"", b"")
            return batches
        batches.append(decode_batch(int.from_bytes(number, "big"), payload))
    raise AssertionError("no end mark")


class Books:
    """What a subscriber knows."""

    def __init__(self):
        self.known = set()
        self.next_seq = 0

    def book(self, batch):
        assert batch.seq == self.next_seq
        self.next_seq += 1
        for event in batch.events:
            match event:
                case BlockStored():
                    self.known.update(event.block_hashes)
                case BlockRemoved():
                    self.known.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.known.clear()


def test_a_late_subscriber_rebuilds_the_cache_from_replay_and_live_events(make_runner, publisher, sockets):
    runner = make_runner(num_blocks=12, max_sequences=3)
    chance = random.Random(1)
    source = publisher(topic="kv@test")
    source.start()
    books = Books()

    def work(steps):
        for _ in range(steps):
            if chance.random() < 0.4:
                start, length = chance.choice([0, 20]), chance.randrange(1, 30)
                runner.add([(start + i) % 50 for i in range(length)], max_tokens=chance.randrange(1, 9))
            runner.step()
            if not runner.scheduler.has_work and chance.random() < 0.05:
                assert runner.pool.clear()
            if events := runner.pool.drain_events():
                source.publish(0.0, events)

    work(100)  # nobody listens yet
    sub = sockets(zmq.SUB)
    sub.subscribe(b"kv@test")
    sub.connect(local(source.endpoint))
    while not sub.poll(10):
        work(1)
    topic, number, payload = sub.recv_multipart()
    assert topic == b"kv@test"
    first = decode_batch(int.from_bytes(number, "big"), payload)
    for batch in ask_replay(sockets, source.replay_endpoint, 0):
        if batch.seq < first.seq:
            books.book(batch)
    books.book(first)
    work(100)
    while sub.poll(200):
        _, number, payload = sub.recv_multipart()
        books.book(decode_batch(int.from_bytes(number, "big"), payload))
    assert runner.scheduler.preemptions > 0
    assert books.known == {wire_hash(content) for content in runner.pool.known_contents()} != set()


def test_replay_keeps_the_last_batches_only_and_starts_where_asked(publisher, sockets):
    source = publisher(buffer_steps=3)
    source.start()
    for _ in range(10):
        source.publish(1.0, [AllBlocksCleared()])
    assert [batch.seq for batch in ask_replay(sockets, source.replay_endpoint, 0)] == [7, 8, 9]
    assert [batch.seq for batch in ask_replay(sockets, source.replay_endpoint, 8)] == [8, 9]
    assert ask_replay(sockets, source.replay_endpoint, 10) == []


def test_a_malformed_replay_request_is_ignored(publisher, sockets):
    source = publisher()
    source.start()
    source.publish(1.0, [AllBlocksCleared()])
    dealer = sockets(zmq.DEALER)
    dealer.connect(local(source.replay_endpoint))
    dealer.send_multipart([b"", b"short"])
    dealer.send_multipart([b"1", b"2", b"3"])
    assert len(ask_replay(sockets, source.replay_endpoint, 0)) == 1


def test_batches_over_the_limit_are_dropped_counted_and_leave_a_gap(publisher, sockets):
    source = publisher(max_queue_size=2)
    for _ in range(10):  # the thread does not run yet
        source.publish(1.0, [AllBlocksCleared()])
    assert source.dropped >= 7
    kept = list(range(10 - source.dropped))
    source.start()
    assert [batch.seq for batch in ask_replay(sockets, source.replay_endpoint, 0)] == kept
    while True:  # the pipe tells its sender of new room a little later
        dropped = source.dropped
        source.publish(1.0, [AllBlocksCleared()])
        if source.dropped == dropped:
            break
        time.sleep(0.01)
    (*before, last) = ask_replay(sockets, source.replay_endpoint, 0)
    assert [batch.seq for batch in before] == kept
    assert last.seq == len(kept) + source.dropped


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/events", True),
        ("inproc://events", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://router.example:5557", False),
    ],
)
def test_who_binds_is_told_by_the_endpoint(endpoint, bound):
    assert binds(endpoint) == bound


def test_a_star_is_the_address_that_http_is_served_on():
    assert bind_address("tcp://*:5557", "127.0.0.1") == "tcp://127.0.0.1:5557"
    assert bind_address("tcp://*:5557", "::1") == "tcp://[::1]:5557"
    assert bind_address("tcp://*:5557", "0.0.0.0") == "tcp://*:5557"
    assert bind_address("ipc:///tmp/x", "127.0.0.1") == "ipc:///tmp/x"


def test_a_connecting_publisher_reaches_a_subscriber_that_binds(publisher, sockets):
    sub = sockets(zmq.SUB)
    sub.subscribe(b"")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    source = publisher(endpoint=f"tcp://127.0.0.1:{port}")
    source.start()
    while not sub.poll(10):
        source.publish(2.0, [AllBlocksCleared()])
    _, number, payload = sub.recv_multipart()
    assert decode_batch(int.from_bytes(number, "big"), payload).events == [AllBlocksCleared()]


def test_an_endpoint_in_use_is_told_with_its_flag(publisher):
    source = publisher()
    with pytest.raises(EnvironmentProblem, match=r"--kv-events-config: cannot bind tcp://\*:\d+"):
        publisher(endpoint=source.endpoint)


def test_the_engines_events_predict_what_its_requests_find(served, sockets):
    """Token ids in events are enough to tell `cached_tokens` of any prompt."""
    assert served.http.post("/reset_prefix_cache").json() == {"success": True}
    sources = served.http.get("/kv_event_sources").json()["0"]
    prompt = [(11 * i) % 250 for i in range(200)]
    output = served.tokens(prompt, max_tokens=60)
    served.tokens([*prompt[:100], 7, 8, 9], max_tokens=1, cache_salt="s")
    prefixes = {}
    for batch in ask_replay(sockets, sources["replay_endpoint"], 0):
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                prefixes.clear()
                continue
            before = prefixes.get(event.parent_block_hash, ())
            for i, name in enumerate(event.block_hashes):
                before = (*before, *event.token_ids[i * 32 : (i + 1) * 32])
                prefixes[name] = before
    known = [*prompt, *output[:-1]]  # the last token is never computed
    longest = max(prefixes.values(), key=len)
    assert longest == tuple(known[: len(known) // 32 * 32])
    asked = served.complete([*known, 1], max_tokens=1)
    assert asked["usage"]["prompt_tokens_details"]["cached_tokens"] == len(longest)
