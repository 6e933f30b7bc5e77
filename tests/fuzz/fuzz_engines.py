"""What an engine says of itself, from its pages to the router's first decision on it.

Discovery asks; what it does not understand is an error that the supervisor expects, and what it takes the
router can live with: numbers of any size among it.
"""

from typing import Any

import msgspec
from fuzz_bytes import Choices
from fuzz_words import VALUES

from sumibi.core.errors import SumibiError
from sumibi.engines import discovery
from sumibi.engines.discovery import EngineInfo, discover
from sumibi.engines.http import Reply
from sumibi.routing.events import (
    Admitted,
    Arrived,
    Dispatch,
    EndpointUp,
    Finished,
    FinishReason,
    FirstToken,
    Signals,
    Tier,
)
from sumibi.routing.router import Router

NUMBERS = (
    b"1",
    b"0",
    b"-1",
    b"16",
    b"1e308",
    b"1e-308",
    b"0.5",
    b"9007199254740993",
    b"4611686018427387904",
    b"null",
)
PAGES = {
    "/health": (b"{}",),
    "/v1/models": (
        b'{"data": [{"id": "m"}]}',
        b'{"data": [{"id": "m", "root": "r", "max_model_len": %b}, {"id": "a", "root": "r", "parent": "m"}]}',
        b'{"data": [{"id": ""}, {"id": "m"}, {"id": "m"}]}',
        b'{"data": []}',
        b'{"data": [%b]}',
    ),
    "/metrics": (
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n',
        b'vllm:cache_config_info{block_size="%b",num_gpu_blocks="%b"} 1\nsumibi:max_num_seqs %b\n',
        b"process_start_time_seconds %b\nvllm:num_requests_running %b\nvllm:kv_cache_usage_perc %b\n",
        b"",
    ),
    "/kv_event_sources": (
        b"{}",
        b'{"0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}}',
        b'{"3": {"enable_kv_cache_events": true, "endpoint": "ipc:///x", "kv_bytes_per_token": %b}}',
        b'{"-1": null, "70": null, "0": {"kv_tiers": [{"name": "CPU", "tokens": %b, "gb_per_s": %b,'
        b' "latency_s": %b}, {"name": "cpu"}, {"name": "", "shared": true}]}}',
        b'{"x": 1}',
    ),
    "/kv_transfer": (
        b"",
        b'{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "remote_port": %b}',
        b'{"kv_connector": "x", "kv_role": "kv_consumer"}',
    ),
}


def _page(choose: Choices, path: str) -> bytes:
    page = choose.pick(PAGES[path])
    while b"%b" in page:
        page = page.replace(b"%b", choose.pick(VALUES) if choose.once_in(6) else choose.pick(NUMBERS), 1)
    return choose.damaged(page) if choose.once_in(4) else page


def engines(data: bytes) -> None:
    """An engine is described, or not taken for one; of one that is, requests can be placed on it."""
    choose = Choices(data)

    async def ask(host: str, port: int, path: str, **_: Any) -> Reply:
        return Reply(
            choose.pick((200, 200, 200, 200, 404, 500)) if choose.once_in(3) else 200, _page(choose, path)
        )

    before, discovery.ask = discovery.ask, ask
    asking = discover("http://e:1")
    try:
        asking.send(None)
    except StopIteration as said:
        info: EngineInfo = said.value
    except SumibiError:
        return
    finally:
        discovery.ask = before
        asking.close()
    router = Router()
    for rank in info.ranks:
        router.handle(up(info, rank))
    place(router, choose, info)


def up(info: EngineInfo, rank: Any) -> EndpointUp:
    """As the supervisor tells it."""
    return EndpointUp(
        t=1.0,
        endpoint=rank.endpoint,
        models=list(info.models),
        aliases=list(info.aliases),
        engine_block_tokens=rank.signals.block_tokens,
        kv_tokens=rank.signals.kv_tokens,
        max_sequences=rank.signals.max_sequences,
        tiers=[msgspec.convert(tier, Tier, from_attributes=True) for tier in rank.tiers],
        kv_bytes_per_token=rank.kv_bytes_per_token,
        prefetches=rank.prefetches,
        has_events=rank.events is not None,
        has_replay=rank.events is not None and rank.events.replay is not None,
        process_start_s=rank.signals.process_start_s,
    )


def place(router: Router, choose: Choices, info: EngineInfo) -> None:
    """A few requests come, are placed and end."""
    t = 1.0
    for number in range(3):
        name, t = f"r{number}", t + 0.5
        keys = list(range(1, 1 + choose.below(60)))
        router.handle(
            Arrived(
                t=t,
                request=name,
                model=info.models[0],
                keys=keys,
                prompt_tokens=16 * len(keys) + choose.below(16),
                max_tokens=choose.pick((None, 1, 1 << 40)),
            )
        )
        placed = [each for each in router.handle(Admitted(t=t, request=name)) if isinstance(each, Dispatch)]
        for rank in info.ranks:
            seen = rank.signals
            router.handle(
                Signals(
                    t=t,
                    endpoint=rank.endpoint,
                    scraped_t=t,
                    running=seen.running,
                    waiting=seen.waiting,
                    kv_usage=seen.kv_usage,
                    process_start_s=seen.process_start_s,
                )
            )
        if placed:
            router.handle(FirstToken(t=t + 0.1, request=name, attempt=1))
            router.handle(
                Finished(
                    t=t + 0.2,
                    request=name,
                    attempt=1,
                    reason=FinishReason.STOP,
                    answered=True,
                    output_tokens=3,
                )
            )
    router.check_integrity()
    router.fleet_view()
