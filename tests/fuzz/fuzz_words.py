"""Everything else that comes from outside and is parsed: bodies of requests, answers, engines' events, pages
and replies, blocks on a disk. What is not as it should be is refused by the error that its callers expect;
nothing else is raised, nothing hangs, and nothing is read differently because it came in other pieces.
"""

from functools import partial
from typing import Any

import msgspec
from fuzz_bytes import Choices

from sumibi.core.errors import BadRequest, WireError
from sumibi.engines.connectors import (
    CONNECTORS,
    Values,
    decode_body,
    prefill_body,
    read_prefill_answer,
    unpairable,
)
from sumibi.engines.kvevents import BatchReceived, MalformedMessage, _record
from sumibi.engines.signals import parse_signals
from sumibi.gateway.answers import EventStream, JsonAnswer
from sumibi.gateway.readings import reading_of
from sumibi.gateway.rewriting import Cached, with_cached
from sumibi.prompts.dialects import DIALECTS, Dialect, parse_request
from sumibi.prompts.keys import PromptReader
from sumibi.prompts.template import UnsupportedContent
from sumibi.routing.config import RouterConfig
from sumibi.routing.events import AskReplay, EndpointUp, EngineBatch, ReplayEnded
from sumibi.routing.router import Router
from sumibi.tiers import blockfile

# --- JSON, sound and not

VALUES = (
    b"null",
    b"true",
    b"0",
    b"1",
    b"16",
    b"-1",
    b"1.5",
    b"1e999",
    b"18446744073709551616",
    b"-9223372036854775809",
    b"NaN",
    b'""',
    b'"a"',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\xff"',
    b'"\xc3\xa9\xf0\x9f\x94\xa5"',
    b'"' + b"x" * 300 + b'"',
    b"[]",
    b"[1, 2, 3]",
    b"[[1], [2, 3]]",
    b'["a", "b"]',
    b"[null]",
    b"{}",
    b'{"a": 1}',
    b'{"a": 1, "a": 2}',
    b"[" * 600,
    b"[" * 3000 + b"]" * 3000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000,
)
MESSAGES = (
    b'[{"role": "user", "content": "hi"}]',
    b'[{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}]',
    b'[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]',
    b'[{"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function":'
    b' {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]',
    b'[{"role": 5, "content": {"a": [1]}}]',
    b'[{"role": "user", "content": [null, "x", 3, {"text": 4}]}]',
    b"[3]",
    b'["a"]',
    b'[{"role": "user", "content": "\\ud83d"}]',
)
TOOLS = (
    b'[{"type": "function", "function": {"name": "f", "parameters": {}}}]',
    b'[{"name": "f", "input_schema": {"type": "object"}}]',
    b'[{"type": "function", "function": {"name": 3}}]',
    b'[{"type": "function", "name": "f", "parameters": null}]',
    b"[1]",
)
NAMES = (
    *("model", "messages", "prompt", "input", "text", "input_ids", "token_ids", "sampling_params", "system"),
    *("tools", "tool_choice", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens"),
    *("max_output_tokens", "instructions", "cache_salt", "truncate_prompt_tokens", "kv_transfer_params"),
    *("bootstrap_host", "documents", "reasoning_effort", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message", "add_special_tokens", "previous_response_id"),
    *("conversation", "background", "thinking", "metadata", "features", "prompt_logprobs", "best_of"),
    *("return_logprob", "rid", "lora_path", "session_params", "reasoning", "truncation", "\\u006dodel"),
)
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/chat/completions/render",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/inference/v1/generate",
    "/generate",
    "/nowhere",
)


def object_of(choose: Choices, names: tuple[str, ...]) -> bytes:
    """A JSON object with some of these fields, of any type."""
    fields = []
    for _ in range(choose.below(6)):
        name = choose.pick(names)
        match choose.below(4):
            case 0 if "messages" in name or name == "input":
                value = choose.pick(MESSAGES)
            case 1 if "tools" in name:
                value = choose.pick(TOOLS)
            case 2:
                value = b"{%b}" % b", ".join(
                    b'"%b": %b' % (choose.pick(names).encode(), choose.pick(VALUES))
                    for _ in range(choose.below(3))
                )
            case _:
                value = choose.pick(VALUES)
        fields.append(b'"%b": %b' % (name.encode(), value))
    return b"{" + b", ".join(fields) + b"}"


def dialects(data: bytes) -> None:
    """A body is a request whose prompt has keys, or it is refused; so are the bodies of a pair."""
    choose = Choices(data)
    path = choose.pick(PATHS)
    body = object_of(choose, NAMES)
    if not choose.once_in(3):  # with what each path needs
        sound = b'{"model": "m", "messages": %b, "prompt": "p", "input": "i", "max_tokens": 3, ' % (
            choose.pick(MESSAGES)
        )
        body = sound + body[1:] if body != b"{}" else sound[:-2] + b"}"
    body = choose.damaged(body)
    try:
        asked = parse_request(path, body)
        prompt = PromptReader().read(asked)
    except BadRequest:
        pass
    else:
        assert prompt.prompt_tokens >= 0
        assert len(prompt.keys) <= max(1, prompt.prompt_tokens)
        assert asked.n >= 1
        try:
            assert isinstance(asked.messages, list)
            assert asked.tools is None or isinstance(asked.tools, list)
        except (BadRequest, UnsupportedContent):
            pass  # said at the latest where they are rendered
    values = Values(host="h", port=1, room=2, transfer_id="t", returned=msgspec.Raw(b"{}"))
    api = DIALECTS.get(path, Dialect.CHAT).value
    for connector in CONNECTORS.values():
        for make in (partial(prefill_body, connector, api), partial(decode_body, connector)):
            try:
                made = make(body, values)
            except BadRequest:
                continue
            assert isinstance(msgspec.json.decode(made, type=dict[str, msgspec.Raw]), dict)
        try:
            unpairable(connector, api, body)
        except BadRequest:
            pass


# --- answers on their way through

EVENTS = (
    b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}',
    b'data: {"choices": [{"finish_reason": "stop"}]}',
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}',
    b'data: {"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}}',
    b'data: {"usage": {"prompt_tokens": -7, "completion_tokens": 3}}',
    b'data: {"usage": {"prompt_tokens": 1e99, "completion_tokens": "3"}}',
    b'data: {"usage": null, "error": {"message": "x"}}',
    b'data: {"error": {"message": "x"}}',
    b'data: {"finish_reason": "x", "choices": {"finish_reason": 3}}',
    b'data: {"choices": [{"finish_reason": "\xff"}]}',
    b'data: {"usage": ' + b"[" * 3000,
    b'data: {"response": {"usage": {"input_tokens": 5, "output_tokens": 1, "input_tokens_details": null}}}',
    b'event: message_delta\ndata: {"type": "message_delta", "usage": {"output_tokens": 3}}',
    b'event: message_start\ndata: {"message": {"usage": {"input_tokens": 5, "cache_read_input_tokens": 2}}}',
    b'event: message_stop\ndata: {"type": "message_stop", "delta": {"stop_reason": "end_turn"}}',
    b'data: {"meta_info": {"prompt_tokens": 7, "completion_tokens": 3, "finish_reason": {"type": "stop"}}}',
    b'data: [{"meta_info": {"prompt_tokens": 7, "completion_tokens": -3, "cached_tokens": 9}}, {}]',
    b'data: {"type": "response.completed", "response": {"status": "incomplete", "usage": {}}}',
    b'data: {"type": "message_delta", "usage": {"input_tokens": "x", "output_tokens": 99999999999999999999}}',
    b"data: [DONE]",
    b"data:",
    b": a comment",
    b"data: {",
    b"\xff\xfe",
    b"data: a\r",
    b"",
)
SEPARATORS = (b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n", b"\r", b"\r\n", b"\n\r\n", b"\r\r", b"")
CACHED = (None, Cached(5), Cached(0, {"host": 0}))


def streams(data: bytes) -> None:
    """A stream goes on whole and in order; it is cut at ends of events; its reading depends on no piece."""
    choose = Choices(data)
    stream = b"".join(choose.pick(EVENTS) + choose.pick(SEPARATORS) for _ in range(choose.below(9)))
    stream = choose.damaged(stream)
    pieces = choose.cut(stream)
    reading = reading_of(choose.pick(list(Dialect)))
    whole, cut, changed = EventStream(reading), EventStream(reading), EventStream(reading)
    blocks = [cut.feed([piece]) for piece in pieces]
    for block in filter(None, blocks):
        assert block.endswith((b"\n\n", b"\r\n\r\n")), f"{block!r} is no end of an event"
    rest = cut.rest()
    assert b"".join(blocks) + rest == stream
    passed = (whole.feed([stream]) if stream else b"") + whole.rest()
    assert passed == stream
    if not rest:
        readings = [(each.usage(), each.finish(), each.failed()) for each in (whole, cut)]
        assert readings[0] == readings[1], f"{stream!r} in {pieces!r}: {readings}"
    changed.cached = choose.pick(CACHED)
    for piece in pieces:
        changed.feed([piece])
    changed.rest()
    changed.usage()


ANSWERS = ("usage", "choices", "error", "response", "prompt_tokens", "cached_tokens", "id", "content")


def answers(data: bytes) -> None:
    """An answer without streaming: read or not, held or not, never changed but where it is to be."""
    choose = Choices(data)
    body = object_of(choose, ANSWERS)
    if choose.once_in(2):
        body = choose.pick(EVENTS).partition(b"data: ")[2]
    body = choose.damaged(body)
    pieces = choose.cut(body)
    reading = reading_of(choose.pick(list(Dialect)))
    answer = JsonAnswer(reading)
    answer.feed(pieces)
    usage = answer.usage()
    if usage is not None:
        counts = (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
        assert min(count or 0 for count in counts) >= 0
    answer.finish()
    held = JsonAnswer(reading)
    for piece in pieces:
        assert held.overflows([piece]) is None
    if pieces:
        assert held.whole() == body
    with_cached(body, Cached(3, {"host": 3}))


# --- what engines say beside answers

HASHES: tuple[Any, ...] = (1, 2, 3, 4, 5, b"a", b"b", b"", -1, 1 << 63, "x", None, 1.5, [1])
MEDIA = (None, "GPU", "cpu", "disk", "", 3)
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "Future", 3, None, [1], {"a": 1})


def event_of(choose: Choices) -> Any:
    """One KV event, as a map or an array, right or wrong."""
    size = choose.pick((16, 16, 16, 4, 8, 32, 1, 0, -1, 1 << 40))
    hashes = [choose.pick(HASHES[: choose.pick((5, 7, len(HASHES)))]) for _ in range(choose.below(4))]
    tokens = list(range(max(0, min(size, 64)) * len(hashes)))
    if choose.once_in(5):
        tokens = [*tokens[: choose.below(len(tokens) + 1)], choose.pick((-1, 1 << 32, 7, 1 << 70, "x"))]
    event: dict[str, Any] = {"type": choose.pick(KINDS[: choose.pick((1, 3, len(KINDS)))])}
    event["block_hashes"] = hashes
    event["parent_block_hash"] = (
        choose.pick(HASHES[: choose.pick((5, len(HASHES)))]) if choose.below(2) else None
    )
    event |= {"token_ids": tokens, "block_size": size, "lora_id": choose.pick((None, None, 1, "x"))}
    event["medium"] = choose.pick(MEDIA)
    if choose.once_in(3):
        event["lora_name"] = choose.pick((None, "m", "adapter", {"cache_salt": "s"}, {"cache_salt": 3}))
        event["extra_keys"] = choose.pick(
            (None, [], [None], [["s"]], [["a", 1], None], [[[1]]], "x", [[b"\xff"]])
        )
        event["group_idx"] = choose.pick((None, 0, 1, -1, "x"))
        event["kv_cache_spec_kind"] = choose.pick((None, "full_attention", "sliding_window", 3))
    if choose.once_in(6):
        event.pop(choose.pick(list(event)))
    if choose.once_in(3):
        return [event.get("type"), *[value for name, value in event.items() if name != "type"]]
    return event


def payload_of(choose: Choices) -> bytes:
    """A batch of events, or what might be taken for one."""
    events = [event_of(choose) for _ in range(choose.below(4))]
    rank = choose.pick((0, None, 1, "x", -1))
    batch: Any = [choose.pick((1.5, 1, "x", None)) if choose.once_in(5) else 2.5, events, rank]
    if choose.once_in(6):
        batch = {"ts": 1.0, "events": events, "data_parallel_rank": rank}
    try:
        payload = msgspec.msgpack.encode(batch)
    except (OverflowError, msgspec.MsgspecError):
        payload = b"\x93"  # an integer that msgpack cannot hold
    if choose.once_in(12):
        payload = b"\x91" * 3000
    return choose.damaged(payload)


def kv_events(data: bytes) -> None:
    """A message is a batch that the router takes, or malformed; index and ledger stay in one piece."""
    choose = Choices(data)
    router = Router(RouterConfig(max_orphan_blocks=4, max_buffered_batches=3, max_index_blocks=64))
    engine, model, t = "http://e:1#0", "m", 0.0
    router.handle(
        EndpointUp(
            t=t, endpoint=engine, models=[model], engine_block_tokens=16, has_events=True, has_replay=True
        )
    )
    seq = 0
    for _ in range(1 + choose.below(5)):
        seq = choose.pick((seq + 1, seq + 1, seq, seq + 3, 0, (1 << 64) - 1, 1 << 63))
        frames = [b"kv@m", (seq % (1 << 64)).to_bytes(8, "big"), payload_of(choose)]
        if choose.once_in(8):
            frames = [choose.raw(9) for _ in range(choose.below(5))]
        record = _record(frames, replayed=choose.once_in(3))
        if isinstance(record, BatchReceived):
            t += 0.01
            asked = router.handle(
                EngineBatch(
                    t=t, endpoint=engine, batch=record.batch, digest=record.digest, replayed=record.replayed
                )
            )
            if any(isinstance(each, AskReplay) for each in asked) and choose.once_in(2):
                router.handle(ReplayEnded(t=t, endpoint=engine, ok=choose.once_in(2)))
        else:
            assert record is None or isinstance(record, MalformedMessage)
    router.check_integrity()


def replies(data: bytes) -> None:
    """A prefill engine's reply gives what the decode half needs, or is refused; counts are sane or absent."""
    choose = Choices(data)
    ids = choose.pick(
        (b"[[1, 2]]", b"[1, 2]", b"[[]]", b"[]", b"[[1], []]", b'["x"]', b"[[-1]]", b"[[1.5]]", b"3")
    )
    inner = [
        b'"do_remote_prefill": %b' % choose.pick((b"true", b"false", b"1")),
        b'"remote_engine_id": %b' % choose.pick((b'"e"', b'""', b"null", b"3")),
        b'"remote_request_id": "r"',
        b'"remote_host": "h"',
        b'"remote_port": %b' % choose.pick((b"5600", b"0", b"65536", b"-1", b'"1"')),
        b'"remote_block_ids": ' + ids,
        b'"remote_prefill_cached_tokens": %b' % choose.pick((b"0", b"5", b"-5", b"null")),
    ]
    if choose.once_in(3):
        del inner[choose.below(len(inner))]
    usage = (
        b'{"prompt_tokens": %b, "prompt_tokens_details": {"cached_tokens": %b, "cached_tokens_by_tier": %b}}'
        % (
            choose.pick((b"7", b"-7", b"1e9", b"null", b"99999999999999999999999")),
            choose.pick((b"5", b"9", b"-1", b"null", b'"x"')),
            choose.pick((b"null", b'{"host": 3}', b"[]", b'{"a": -1}')),
        )
    )
    returned = b"{%b}" % b", ".join(inner)
    if choose.once_in(4):
        returned, usage = choose.pick(VALUES), choose.pick(VALUES)
    body = choose.damaged(b'{"kv_transfer_params": %b, "usage": %b}' % (returned, usage))
    for connector in CONNECTORS.values():
        try:
            answer = read_prefill_answer(connector, body)
        except WireError:
            continue
        prompt, cached = answer.prompt_tokens, answer.cached_tokens
        assert min(prompt or 0, cached or 0) >= 0
        assert prompt is None or (cached or 0) <= prompt
        values = Values(host="h", port=1, room=2, transfer_id="t", returned=answer.returned)
        decode_body(connector, b'{"model": "m"}', values)


LINES = (
    b'vllm:num_requests_running{engine="0"} ',
    b'vllm:num_requests_running{engine="1"} ',
    b"vllm:num_requests_waiting ",
    b"vllm:kv_cache_usage_perc ",
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} ',
    b'vllm:cache_config_info{block_size="%b",num_gpu_blocks="%b"} ' % (b"9" * 5000, b"0"),
    b'vllm:cache_config_info{block_size="\xd9\xa3",num_gpu_blocks="1.5"} ',
    b'sglang:cache_config_info{page_size="1",num_pages="7"} ',
    b"sglang:max_total_num_tokens ",
    b"sumibi:max_num_seqs ",
    b"process_start_time_seconds ",
    b"# HELP vllm:num_requests_running ",
    b"vllm:num_requests_running",
)
NUMBERS = (
    b"0",
    b"3.0",
    b"1e308",
    b"1.7e308",
    b"inf",
    b"nan",
    b"-1",
    b"x",
    b"",
    b"1_0",
    b"9" * 5000,
    b"3 1700000000",
)


def pages(data: bytes) -> None:
    """A metrics page says something sane of an engine, or nothing."""
    choose = Choices(data)
    page = b"".join(
        choose.pick(LINES) + choose.pick(NUMBERS) + choose.pick((b"\n", b"\n", b"\r\n", b"", b"}\n"))
        for _ in range(choose.below(12))
    )
    page = choose.damaged(page)
    for rank, ranks in ((0, 1), (1, 2)):
        seen = parse_signals(page, rank=rank, ranks=ranks)
        assert min(seen.running or 0, seen.waiting or 0, seen.kv_usage or 0) >= 0
        assert (seen.kv_usage or 0) <= 1
        assert seen.block_tokens is None or seen.block_tokens > 0


# --- what is read back from a disk or a store


def blocks(data: bytes) -> None:
    """Of a block's bytes a damaged one is never taken for whole; undamaged it is what was written."""
    choose = Choices(data)
    payload, content_id, parent = choose.raw(64), choose.raw(31) + b"i", choose.raw(32) or None
    namespace = blockfile.namespace_digest("n", len(payload))
    header = blockfile.Header(namespace, content_id, parent, len(payload), blockfile.checksum(payload))
    sound = blockfile.encode_header(header) + payload
    found = choose.damaged(sound)
    head, body = found[: blockfile.HEADER_BYTES], found[blockfile.HEADER_BYTES :]
    try:
        read = blockfile.check(head, body, namespace=namespace, content_id=content_id)
    except blockfile.Corrupt:
        assert found != sound
    else:
        assert found == sound
        assert read == header
    try:
        blockfile.decode_header(choose.rest())
    except blockfile.Corrupt:
        pass
