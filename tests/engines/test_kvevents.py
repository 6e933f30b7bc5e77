"""The KV event stream and its replay, over real ZMQ sockets."""

import asyncio
import contextlib
import socket

import pytest
import zmq
import zmq.asyncio

from sumibi.core.kvevents import AllBlocksCleared, BlockRemoved, encode_batch
from sumibi.engines.discovery import EventSource
from sumibi.engines.kvevents import (
    BatchReceived,
    MalformedMessage,
    ReplayLimits,
    StreamLost,
    StreamUp,
    follow,
    replay,
)

FAST = ReplayLimits(total_s=5.0, idle_s=0.05, attempts=2)


@contextlib.asynccontextmanager
async def context():
    it = zmq.asyncio.Context()
    try:
        yield it
    finally:
        it.destroy(linger=0)


def payload(seq):
    return encode_batch(float(seq), [BlockRemoved([seq])])


def number(seq):
    return seq.to_bytes(8, "big")


async def until(condition):
    while not condition():
        await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def following(source, records, zmq_context):
    task = asyncio.ensure_future(follow(source, records.append, zmq_context))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("publisher_binds", [True, False])
async def test_batches_arrive_decoded_and_in_order_whoever_binds(publisher_binds):
    records = []
    async with context() as zmq_context:
        publisher = zmq_context.socket(zmq.PUB)
        if publisher_binds:
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
        else:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            publisher.connect(f"tcp://127.0.0.1:{port}")
        source = EventSource(f"tcp://127.0.0.1:{port}", bind=not publisher_binds)
        async with following(source, records, zmq_context):
            await until(lambda: StreamUp() in records)
            while not any(isinstance(record, BatchReceived) for record in records):  # until subscribed
                await publisher.send_multipart([b"kv@x", number(0), payload(0)])
                await asyncio.sleep(0.005)
            for seq in range(1, 200):
                await publisher.send_multipart([b"kv@x", number(seq), payload(seq)])
            await until(lambda: records[-1] != StreamUp() and records[-1].batch.seq == 199)
        publisher.close()
    batches = [record.batch for record in records if isinstance(record, BatchReceived)]
    numbers = [batch.seq for batch in batches if batch.seq > 0]
    assert numbers == list(range(1, 200))
    assert batches[-1].events == [BlockRemoved([199])]


async def test_what_is_no_batch_is_told_and_skipped():
    records = []
    async with context() as zmq_context:
        publisher = zmq_context.socket(zmq.PUB)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        async with following(EventSource(f"tcp://127.0.0.1:{port}"), records, zmq_context):
            await until(lambda: StreamUp() in records)
            while len(records) < 2:
                await publisher.send_multipart([b"lonely"])
                await asyncio.sleep(0.005)
            await publisher.send_multipart([b"", b"short", payload(0)])
            await publisher.send_multipart([b"", number(1), b"\xc1"])
            await publisher.send_multipart([b"", number(2), payload(2)])
            await until(lambda: isinstance(records[-1], BatchReceived))
        publisher.close()
    assert records[-1].batch.seq == 2
    assert [type(record) for record in records[-3:-1]] == [MalformedMessage, MalformedMessage]


async def test_a_publisher_that_goes_and_comes_back_is_noticed_both_times():
    records = []
    async with context() as zmq_context:
        publisher = zmq_context.socket(zmq.PUB)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        async with following(EventSource(f"tcp://127.0.0.1:{port}"), records, zmq_context):
            await until(lambda: records == [StreamUp()])
            publisher.close(linger=0)
            await until(lambda: records == [StreamUp(), StreamLost()])
            again = zmq_context.socket(zmq.PUB)
            again.bind(f"tcp://127.0.0.1:{port}")
            await until(lambda: records == [StreamUp(), StreamLost(), StreamUp()])
            again.close(linger=0)


async def test_an_address_that_is_taken_is_an_error():
    async with context() as zmq_context:
        holder = zmq_context.socket(zmq.SUB)
        port = holder.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.ZMQError):
            await follow(EventSource(f"tcp://127.0.0.1:{port}", bind=True), lambda record: None, zmq_context)
        holder.close()


@contextlib.asynccontextmanager
async def replaying(zmq_context, answers):
    """A replay socket that serves each question by `answers(start)` -> frames to send; yields its address."""
    replies = zmq_context.socket(zmq.ROUTER)
    port = replies.bind_to_random_port("tcp://127.0.0.1")
    asked = []

    async def serve():
        while True:
            peer, empty, start = await replies.recv_multipart()
            assert empty == b""
            asked.append(int.from_bytes(start, "big"))
            for frames in answers(asked):
                await replies.send_multipart([peer, *frames])

    task = asyncio.ensure_future(serve())
    try:
        yield f"tcp://127.0.0.1:{port}", asked
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        replies.close()


END = number((1 << 64) - 1)


@pytest.mark.parametrize("topic", [[], [b"kv@x"]], ids=["without topic", "with topic"])
async def test_a_replay_is_read_to_its_end_mark_in_both_layouts(topic):
    records = []

    def answers(asked):
        yield from ([b"", *topic, number(seq), payload(seq)] for seq in range(asked[-1], 100))
        yield [b"", *([b""] if topic else []), END, b""]

    async with context() as zmq_context, replaying(zmq_context, answers) as (address, asked):
        assert await replay(address, 5, records.append, zmq_context, FAST)
    assert asked == [5]
    assert [record.batch.seq for record in records] == list(range(5, 100))
    assert all(record.replayed for record in records)


async def test_a_replay_that_stops_is_asked_for_again_from_where_it_stopped():
    records = []

    def answers(asked):
        yield from ([b"", number(seq), payload(seq)] for seq in range(asked[-1], asked[-1] + 3))
        if len(asked) == 3:
            yield [b"", END, b""]

    async with context() as zmq_context, replaying(zmq_context, answers) as (address, asked):
        assert await replay(address, 0, records.append, zmq_context, FAST)
    assert asked == [0, 3, 6]
    assert [record.batch.seq for record in records] == list(range(9))


async def test_a_replay_without_answers_is_given_up():
    async with context() as zmq_context, replaying(zmq_context, lambda asked: []) as (address, asked):
        assert not await replay(address, 7, [].append, zmq_context, FAST)
        assert asked == [7, 7]


async def test_a_replay_without_end_is_given_up():
    def answers(asked):
        yield [b"", number(asked[-1]), payload(0)]

    limits = ReplayLimits(total_s=0.3, idle_s=0.02, attempts=2)
    async with context() as zmq_context, replaying(zmq_context, answers) as (address, _):
        assert not await replay(address, 0, [].append, zmq_context, limits)


async def test_equal_payloads_have_equal_digests():
    records = []

    def answers(asked):
        for seq, data in ((0, payload(0)), (1, payload(1)), (2, payload(0))):
            yield [b"", number(seq), data]
        yield [b"", END, encode_batch(0.0, [AllBlocksCleared()])]

    async with context() as zmq_context, replaying(zmq_context, answers) as (address, _):
        assert await replay(address, 0, records.append, zmq_context, FAST)
    first, second, third = (record.digest for record in records)
    assert first == third != second
