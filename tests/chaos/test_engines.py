"""Engines that hang, reset, send garbage, lie and flap: what clients see, and that nobody else suffers."""

import asyncio
import time

import pytest
from benchmarks.soak.client import Client, ask, chat
from benchmarks.soak.processes import until

# Trouble -> what the client of a plain request and of a stream sees, and what is counted at the endpoint.
# Whatever happens before a byte of the answer costs nothing but a second try.
TROUBLES = {
    "hang": ("ok", "ok", "timeout"),
    "reset": ("ok", "ok", "engine_gone"),
    "garbage-status": ("ok", "ok", "engine_gone"),
    "429": ("ok", "ok", "engine_error"),
    "500": ("ok", "ok", "engine_error"),
    "400": ("400", "400", ""),
    "hang-midway": ("cut", "error event: timeout", "timeout"),
    "reset-midway": ("cut", "error event: engine_gone", "engine_gone"),
    "close-midway": ("cut", "error event: engine_gone", "engine_gone"),
    "length-too-long": ("cut", "cut", "engine_gone"),
    "garbage-chunk": ("error event: engine_gone", "error event: engine_gone", "engine_gone"),
    "error-in-stream": ("error event: the engine's", "error event: the engine's", "engine_error"),
    "length-too-short": ("ok", "ok", ""),
    "garbage-stream": ("ok", "ok", ""),
    "usage-negative": ("ok", "ok", ""),
    "usage-huge": ("ok", "ok", ""),
    "usage-contradicts": ("ok", "ok", ""),
}
EACH = 4


def failures(site, reason):
    return site.gateway.metric("sumibi_endpoint_failures_total", f'reason="{reason}"')


@pytest.mark.parametrize("name", TROUBLES)
def test_an_engine_s_trouble_is_its_request_s_alone(site, together, name):
    plain, streamed, counted = TROUBLES[name]
    before = failures(site, counted)
    port = site.gateway.port
    asked = [ask(port, chat(trouble=name, stream=stream)) for stream in (False, True) for _ in range(EACH)]
    others = [ask(port, chat(stream=stream, pace_s=0.01)) for stream in (False, True) for _ in range(EACH)]
    seen = [one.outcome for one in together(*asked, *others)]
    assert seen[: 2 * EACH] == [plain] * EACH + [streamed] * EACH
    assert seen[2 * EACH :] == ["ok"] * 2 * EACH
    if counted:
        assert failures(site, counted) == before + 2 * EACH


def test_what_every_engine_does_to_a_request_is_told_and_not_tried_for_ever(site, together):
    asked = [ask(site.gateway.port, chat(trouble=name, trouble_tries=9)) for name in ("reset", "hang", "500")]
    reset, hangs, failed = together(*asked)
    assert (reset.status, reset.error) == (502, "engine_gone")
    assert (hangs.status, hangs.error) == (504, "timeout")
    assert failed.status == 500  # an engine's own word is passed on


def test_lies_about_usage_are_not_counted(site, together):
    """Sums and the usage log take no count that cannot be."""
    together(*(ask(site.gateway.port, chat(trouble=f"usage-{lie}")) for lie in ("negative", "huge")))
    for name in ("sumibi_output_tokens_sum", "sumibi_prompt_tokens_sum", "sumibi_cached_tokens_sum"):
        assert 0 <= site.gateway.metric(name) < 1e6


def test_an_engine_that_comes_and_goes_every_second_fails_no_request_that_could_be_tried_again(
    site, together
):
    flapping = site.engines[0]
    flapping.tell("flap", every_s=0.5)
    end = time.monotonic() + 4.0

    async def client():
        mine, seen = Client(site.gateway.port), []
        while time.monotonic() < end:
            seen.append((await mine.ask(chat(pace_s=0.02))).outcome)
        mine.close()
        return seen

    seen = [outcome for outcomes in together(*(client() for _ in range(8))) for outcome in outcomes]
    flapping.tell("flap", every_s=0)
    assert set(seen) == {"ok"}
    assert len(seen) > 20
    until(lambda: all(e["up"] for e in site.gateway.fleet()["endpoints"]), "both engines are up again")
    assert flapping.tell("count")["served"] > 0


def test_an_engine_that_says_it_is_not_well_gets_nothing_and_loses_nothing(site, together):
    ill = site.engines[0]

    async def asking():
        long = [
            asyncio.ensure_future(ask(site.gateway.port, chat(stream=True, pace_s=0.3))) for _ in range(6)
        ]
        await asyncio.sleep(0.3)
        ill.tell("health", **{"is": False})
        await asyncio.sleep(0.5)
        before = ill.tell("count")
        others = await asyncio.gather(*(ask(site.gateway.port, chat()) for _ in range(6)))
        assert ill.tell("count")["served"] <= before["served"] + before["running"]
        return [one.outcome for one in [*others, *await asyncio.gather(*long)]]

    (seen,) = together(asking())
    ill.tell("health", **{"is": True})
    assert seen == ["ok"] * 12
    until(lambda: all(e["up"] for e in site.gateway.fleet()["endpoints"]), "the engine is used again")
