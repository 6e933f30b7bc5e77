"""What becomes of a claim, on numbers made by hand."""

import pytest

from sumibi.bench.claims import Claim, Finding, claims_of, figures_of, show
from sumibi.bench.judging import Runs
from sumibi.bench.scenes import Caches, Outcome, Part, Scene
from sumibi.sim.fleet import FleetSpec, Group

FLEET = FleetSpec(name="f", groups=[Group(count=1, latency="glm-5.2/8xh200", kv_tokens=1_000)])


def outcome(
    policy: str, hit: float = 0.5, bound: float = 0.9, pooled: float = 0.8, **figures: object
) -> Outcome:
    whole = Part(
        requests=1,
        served=1,
        hit_rate=hit,
        ttft_mean_s=1.0,
        ttft_p90_s=1.0,
        ttft_p99_s=1.0,
        output_tokens_per_s=1.0,
    )
    return Outcome(
        policy=policy,
        seed=0,
        whole=whole,
        work_share=1.0,
        bound_hit_rate=bound,
        pooled_lru_hit_rate=pooled,
        **figures,
    )


def runs(row: str, name: str, before: Outcome, after: Outcome) -> Runs:
    fleet = Caches(replicas=1, blocks=1) if row != "70B" else FLEET
    return Runs(
        Scene(row=row, name=name, traffic="weka", fleet=fleet), {"round-robin": [before], "cost": [after]}
    )


def test_a_hit_rate_that_cannot_be_had_is_said_to_be():
    claim, *_ = claims_of(
        [
            runs("cache grid", "32 users, 16,384 blocks", outcome("round-robin", 0.35), outcome("cost", 0.7)),
            runs("cache grid", "64 users, 8,192 blocks", outcome("round-robin", 0.1), outcome("cost", 0.69)),
            runs(
                "Mooncake", "8 x 2,048 blocks", outcome("round-robin", 0.1), outcome("cost", 0.6, bound=0.65)
            ),
        ]
    )
    assert [(one.before, one.after, one.held) for one in claim.findings] == [
        (0.35, 0.7, True),
        (0.1, 0.69, False),
        (0.1, 0.6, False),
    ]
    tight, impossible = claim.notes
    assert "64 users" in tight
    assert "80.0%" in tight
    assert "65.0%; 70 % cannot be had there" in impossible


@pytest.mark.parametrize(("after_s", "held"), [(0.30, True), (0.31, False)])
def test_a_median_has_to_fall_by_seventy_percent(after_s: float, held: bool):
    point = runs(
        "70B", "16 agents", outcome("round-robin", ttft_p50_s=1.0), outcome("cost", ttft_p50_s=after_s)
    )
    _, _, claim, *_ = claims_of([point])
    assert [one.held for one in claim.findings] == [held, None]


def test_separate_pools_are_judged_against_the_same_policy_together_too():
    def pools(name: str, blind_s: float, ours_s: float, served: list[int]) -> Runs:
        played = []
        for policy, ttft_s in (("round-robin", blind_s), ("cost", ours_s)):
            one = outcome(policy, served_by_hour=served if policy == "cost" else [50, 100, 400])
            one.whole.ttft_mean_s = ttft_s
            played.append([one])
        scene = Scene(row="P/D", name=name, traffic="weka", fleet=FLEET)
        return Runs(scene, dict(zip(("round-robin", "cost"), played, strict=True)))

    claim = claims_of(
        [
            pools("32 agents, 8 together", 8.0, 2.0, [60, 120, 400]),
            pools("32 agents, 1P + 7D", 9.0, 2.5, [1, 2, 3]),
            pools("32 agents, 2P + 6D", 9.0, 1.5, [70, 160, 400]),
        ]
    )[3]
    assert [(one.before, one.after, one.held) for one in claim.findings] == [
        (8.0, 1.5, True),
        (100, 160, True),
        (2.0, 1.5, False),
        (120, 160, False),
    ]
    assert all("2P + 6D" in one.what for one in claim.findings), "the better split"
    assert "1P + 7D: 2.5 s" in claim.notes[0]
    assert claims_of([])[3].findings == []


def test_a_prompt_of_15_000_tokens_takes_a_second_and_no_queue():
    """70B on four H100, reference values: 1.04 s for 15,000 tokens cold, 0.044 s for 512 after them."""
    finding = claims_of([])[5].findings[0]
    assert finding.before == pytest.approx(1.04 * 15_512 / 15_000, rel=0.07)
    assert finding.after == pytest.approx(0.044, rel=0.02)
    assert finding.held is True


def test_claims_as_text_and_as_figures(capsys: pytest.CaptureFixture[str]):
    rate = Finding("a rate", 0.3, 0.72, "", 0.9, True)
    time = Finding("a time", 4.0, 3.0, "s", None, False)
    claims = [Claim("A claim", [rate, time], ["A note."])]
    show(claims)
    said = capsys.readouterr().out
    assert "1. A claim" in said
    assert "0.3 -> 0.72  (bound 0.9, 80.0% of it)  holds" in said
    assert "4 -> 3 s, -25%  DOES NOT HOLD" in said
    first, second, note = figures_of(claims)
    assert (first.value, first.baseline, first.held) == (0.72, 0.3, True)
    assert (second.value, second.unit, second.held) == (3.0, "s", False)
    assert note.value == "A note."
