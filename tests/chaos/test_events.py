"""KV events that flood, go missing, come in disorder or are garbage, and engines that become others."""

import asyncio
import time

from benchmarks.soak.client import ask, chat
from benchmarks.soak.processes import until

FLOOD = 30_000


def endpoint(site):
    (found,) = (e for e in site.gateway.fleet()["endpoints"] if e["endpoint"] == site.engines[0].name)
    return found


def counter(site, name):
    return site.gateway.fleet()["counters"][name]


def known(site, blocks=50):
    """The gateway knows again, exactly, what the engine has: its last 50 blocks."""
    found, last = endpoint(site), site.engines[0].tell("count")["published"] - 1
    if found["last_sequence"] != last:
        return False
    return found["grade"] == "exact" and found["blocks"] == blocks and not found["suspect"]


def test_a_flood_of_events_holds_up_nobody_and_is_known_in_the_end(site, together):
    engine = site.engines[0]
    engine.tell("publish", batches=60)
    until(lambda: known(site), lambda: f"{endpoint(site)}")
    before, rss = counter(site, "batches"), site.gateway.rss_bytes()

    async def flood():
        await asyncio.to_thread(engine.tell, "publish", batches=FLOOD)

    async def others():
        seen = []
        for _ in range(40):
            began = time.monotonic()
            seen.append(((await ask(site.gateway.port, chat("flood"))).outcome, time.monotonic() - began))
            await asyncio.sleep(0.05)
        return seen

    _, seen = together(flood(), others())
    assert {outcome for outcome, _ in seen} == {"ok"}
    assert max(took_s for _, took_s in seen) < 5.0
    until(lambda: known(site), lambda: f"{endpoint(site)}", 20.0)
    # What was dropped on the way is known by its gap; the rest was read batch by batch.
    assert counter(site, "batches") > before
    assert site.gateway.rss_bytes() - rss < 80e6


def test_batches_that_were_lost_or_come_in_disorder_are_asked_for_again(site):
    engine = site.engines[0]
    engine.tell("publish", batches=60)
    until(lambda: known(site), lambda: f"{endpoint(site)}")
    for how in ({"lose": True}, {"disorder": True}, {"lose": True}):
        asked = counter(site, "replays_asked")
        engine.tell("publish", batches=30, **how)
        engine.tell("publish", batches=30)
        until(lambda asked=asked: counter(site, "replays_asked") > asked, "the gap was seen")
        until(lambda: known(site), lambda: f"{endpoint(site)}")


def test_messages_that_are_no_batches_are_counted_and_the_stream_goes_on(site, together):
    engine = site.engines[0]
    malformed = site.gateway.metric("sumibi_kv_event_malformed_total")
    engine.tell("garble", messages=500)
    engine.tell("publish", batches=60)
    until(lambda: known(site), lambda: f"{endpoint(site)}")
    assert site.gateway.metric("sumibi_kv_event_malformed_total") == malformed + 500
    assert [one.outcome for one in together(*(ask(site.gateway.port, chat()) for _ in range(4)))] == [
        "ok"
    ] * 4


def test_an_engine_that_becomes_another_takes_its_blocks_with_it(site, together):
    engine = site.engines[0]
    engine.tell("publish", batches=60)
    until(lambda: known(site), lambda: f"{endpoint(site)}")
    lives = counter(site, "lives")
    for _ in range(3):
        engine.tell("restart")
    until(lambda: counter(site, "lives") > lives, "another life was noticed")
    until(lambda: endpoint(site)["up"] and endpoint(site)["blocks"] == 0, lambda: f"{endpoint(site)}")
    engine.tell("publish", batches=10)
    until(lambda: known(site, 10), lambda: f"{endpoint(site)}")
    assert [one.outcome for one in together(*(ask(site.gateway.port, chat()) for _ in range(4)))] == [
        "ok"
    ] * 4
