"""Queues as an operator wants them: from the stack file to the router's settings."""

import asyncio
from pathlib import Path

import pytest

from sumibi import cli
from sumibi.core.errors import ConfigError
from sumibi.gateway.assembly import router_config
from sumibi.gateway.queues import bands_of, hold_above_of
from sumibi.local.plan import plan_stack
from sumibi.routing.config import BandLimits, RouterConfig
from sumibi.stack import load_stack


def started_with(argv, monkeypatch):
    """The router's settings of the gateway that a `sumibi serve` command line starts."""
    seen = []
    monkeypatch.setattr("sumibi.gateway.main.main", lambda options: seen.append(options) or 0)
    assert cli.main(argv[argv.index("serve") :]) == 0
    (options,) = seen
    return router_config(options, gateway_epoch=7)


STACK = """
gateway:
  hold_above_s: 2.5
  other_bands: {max_requests: 40, ttl_s: null}
  bands:
    100: {ttl_s: 5}
    -10: {max_requests: 7, max_bytes: 1_000_000}
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", RouterConfig(gateway_epoch=7)),
        ("gateway: {hold_above_s: null}", RouterConfig(gateway_epoch=7, hold_above_s=None)),
        (
            STACK,
            RouterConfig(
                gateway_epoch=7,
                hold_above_s=2.5,
                other_bands=BandLimits(max_requests=40, ttl_s=None),
                bands=[
                    BandLimits(priority=100, max_requests=40, ttl_s=5.0),
                    BandLimits(priority=-10, max_requests=7, max_bytes=1_000_000, ttl_s=None),
                ],
            ),
        ),
    ],
)
def test_the_queues_of_a_stack_file_are_the_router_s(text, wanted, tmp_path, monkeypatch):
    (tmp_path / "stack.yaml").write_text(text)
    stack = load_stack(tmp_path / "stack.yaml")
    plan = plan_stack(stack, model_dir="tiny", state_dir=Path("/run/user/1000/sumibi"), cores=[0])
    assert started_with(plan.children[-1].argv, monkeypatch) == wanted


def test_the_flags_of_serve_are_the_router_s(monkeypatch):
    argv = ["serve", "--engine", "http://a:1", "--hold-above", "none", "--band", "100:max_requests=0"]
    assert started_with(argv, monkeypatch) == RouterConfig(
        gateway_epoch=7, hold_above_s=None, bands=[BandLimits(priority=100, max_requests=0)]
    )


@pytest.mark.parametrize(
    "word",
    [
        "",
        "100",
        "100:",
        "high:ttl_s=1",
        "1.5:ttl_s=1",
        "100:ttl_s",
        "100:ttl_s=0",
        "100:ttl_s=-1",
        "100:ttl_s=inf",
        "100:ttl_s=nan",
        "100:max_requests=1e3",
        "100:max_requests=-1",
        "100:max_bytes=none",
        "100:ttl=5",
        "100:ttl_s=5,",
        "100:ttl_s=5,ttl_s=6",
    ],
)
def test_a_malformed_band_is_named(word):
    with pytest.raises(ConfigError) as error:
        bands_of([word])
    assert repr(word) in str(error.value)


@pytest.mark.parametrize("words", [["1:ttl_s=1", "01:ttl_s=2"], ["other:ttl_s=1", "other:max_bytes=2"]])
def test_a_band_named_twice_is_refused(words):
    with pytest.raises(ConfigError, match="named twice"):
        bands_of(words)


@pytest.mark.parametrize("word", ["", "soon", "0", "-1", "nan", "inf", "0.001"])
def test_a_malformed_time_to_hold_above_is_named(word):
    with pytest.raises(ConfigError, match="--hold-above"):
        hold_above_of(word)


async def test_a_full_queue_refuses_the_next_of_its_priority(lab, behaviours):
    """One runs, one waits, as the limit says; the third gets 429 and one of another priority waits."""
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.hang
        bands, others = bands_of(["other:max_requests=1"])
        options = {"bands": bands, "other_bands": others, "objectives": {"critical": 100}}
        gateway = await it.start(hold_above_s=1e-9, **options)

        def ask(number, **headers):
            body = {"model": "test-model", "prompt": [number] * 64, "max_tokens": 8}
            return asyncio.ensure_future(it.ask("/v1/completions", body, headers))

        def held():
            return {(queue.priority, queue.requests) for queue in gateway.router.counters().held_now}

        waiting = [ask(1)]
        await it.until(lambda: len(engine.requests) == 1)
        waiting.append(ask(2))
        await it.until(lambda: held() == {(0, 1)})
        refused = await ask(3)
        assert (refused.status, refused.json["error"]["code"]) == (429, "rejected-saturated")
        waiting.append(ask(4, **{"x-llm-d-inference-objective": "critical"}))
        await it.until(lambda: held() == {(0, 1), (100, 1)})
        await gateway.stop(0.05)
        await asyncio.gather(*waiting)
