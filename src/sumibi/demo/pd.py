"""`sumibi demo pd`: what long prompts do to those who read a stream, on one pair of engines and on another.

The same script twice, each time on a stack of its own: four answers stream at all times, and every few
seconds a prompt of 2,000 tokens arrives. First on two engines that do both, then on one that prefills and
one that decodes.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from sumibi.core.errors import EngineUnavailable
from sumibi.demo.claims import Claim, Demonstration
from sumibi.demo.pd_report import write_json, write_picture
from sumibi.demo.pd_results import Arrangement, Gap, LongPrompt
from sumibi.demo.run import free_ports, make_directory, stack_of
from sumibi.demo.streams import Arrival, Heard, Kind, Target, keep, play
from sumibi.local.updown import Report
from sumibi.stack import KeyPath

STREAM = Kind("stream", prompt_tokens=64, output_tokens=200)
LONG = Kind("long", prompt_tokens=2_000, output_tokens=16)
STREAMS = 4
FIRST_S, EVERY_S, PROMPTS = 4.0, 4.5, 4
"""When long prompts are sent. One core computes one in some 4 s."""
LEAST_S, MOST_S = 23.0, 83.0
"""How long it takes: until every long prompt has been answered."""
LOWER = 5.0
"""p99 time between tokens, together over apart."""
ARRANGEMENTS: dict[str, dict[KeyPath, object]] = {
    "two engines that do both": {("engines", "count"): 2},
    "one prefills, one decodes": {
        ("engines", "count"): 0,
        ("engines", "prefill"): 1,
        ("engines", "decode"): 1,
    },
}
_PORTS = 5  # two engines, a side channel, gateway, admin door


def run_pd(model: str, out: Path, report: Report) -> Demonstration[Arrangement]:
    """Play both and write `demo-pd.json` and `demo-pd.png` into `out`.

    Raises what `up` raises, EngineUnavailable if a request fails, EnvironmentProblem if `out` cannot be
    written.
    """
    make_directory(out)
    first_port = free_ports(_PORTS)
    arrangements = []
    for name, roles in ARRANGEMENTS.items():
        flags: dict[KeyPath, object] = {
            ("model",): model,
            ("engines", "first_port"): first_port,
            ("gateway", "port"): first_port + 3,
            ("gateway", "admin_port"): first_port + 4,
            ("gateway", "policy"): "round-robin",  # in turn; where roles are apart every request is a pair
        }
        with stack_of({**flags, **roles}, report) as door:
            report(name, f"{STREAMS} streams, {PROMPTS} long prompts, {LEAST_S:.0f} s or more", None)
            arrangements.append(_play(name, Target(door.url, door.model)))
    claims = judge(arrangements)
    write_json(out / "demo-pd.json", arrangements, claims)
    write_picture(out / "demo-pd.png", arrangements, claims)
    return Demonstration(arrangements, claims)


def judge(arrangements: Sequence[Arrangement]) -> list[Claim]:
    """Every claim: `arrangements` are together, then apart."""
    together, apart = arrangements
    ratio = together.itl_p99_s / apart.itl_p99_s
    waited = sum(prompt.first_s is None for each in arrangements for prompt in each.prompts)
    name = "p99 time between tokens of streams, two engines that do both / one prefills, one decodes"
    return [
        Claim(name, ratio, ">=", LOWER, ratio >= LOWER),
        Claim("long prompts that got no first token in time", waited, "<=", 0.0, waited <= 0),
    ]


def _play(name: str, target: Target) -> Arrangement:
    """The script on what runs at `target`."""
    heard: list[Heard] = []
    begun_s = time.perf_counter()
    arrivals = [Arrival(FIRST_S + EVERY_S * n, LONG, f"long/{n}") for n in range(PROMPTS)]

    async def both() -> list[Heard]:
        streams = asyncio.ensure_future(
            keep(target, streams=[STREAM] * STREAMS, prompts=[], seed="streams", lasts_s=MOST_S, heard=heard)
        )
        try:
            prompts = await play(target, arrivals, late_s=MOST_S - arrivals[-1].at_s)
            await asyncio.sleep(begun_s + LEAST_S - time.perf_counter())
        finally:
            streams.cancel()
            await asyncio.gather(streams, return_exceptions=True)
        return prompts

    prompts = asyncio.run(both())
    for one in (*heard, *prompts):
        if one.error:
            raise EngineUnavailable(f"{name}: a request failed: {one.error}")
    gaps = [
        Gap(at_s - begun_s, gap_s)
        for one in heard
        for at_s, gap_s in zip(one.token_s[1:], one.gaps_s, strict=True)
    ]
    if len(gaps) < 2:
        raise EngineUnavailable(f"{name}: streams got no tokens: is the machine very busy?")
    seconds = [gap.gap_s for gap in gaps]
    return Arrangement(
        name=name,
        itl_p50_s=statistics.median(seconds),
        itl_p99_s=statistics.quantiles(seconds, n=100, method="inclusive")[98],
        itl_most_s=max(seconds),
        gaps=gaps,
        prompts=[
            LongPrompt(one.asked_s - begun_s, one.token_s[0] - begun_s if one.token_s else None)
            for one in prompts
        ],
    )
