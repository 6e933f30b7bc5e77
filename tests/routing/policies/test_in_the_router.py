"""Every policy inside the router: what it is told, and that nothing is left of requests that are over."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_lab import BLOCK, MODEL, REPEATABLE, Lab, prompt

from sumibi.core.errors import ConfigError
from sumibi.routing.decisions import read_decisions
from sumibi.routing.events import Dispatch, EndpointDown, FinishReason, Signals
from sumibi.routing.policies import POLICIES, SCORERS, rerun
from sumibi.routing.policies.base import Policy

by_policy = pytest.mark.parametrize("policy", POLICIES)


class Listener(Policy):
    """Writes down what it is told. Sends everything to the first candidate."""

    def __init__(self):
        self.heard = []

    def choose(self, ask, candidates, endpoints):
        self.heard.append(("choose", ask.request, [c.endpoint for c in candidates]))
        return [float(i) for i in range(len(candidates))]

    def placed(self, ask, endpoint):
        self.heard.append(("placed", ask.request, endpoint.name))

    def first_token(self, request):
        self.heard.append(("first", request))

    def ended(self, request, event):
        self.heard.append(("ended", request, event.reason))

    def gone(self, endpoint):
        self.heard.append(("gone", endpoint))


def listening(monkeypatch, **config):
    listener = Listener()
    monkeypatch.setattr("sumibi.routing.choosing.make_policy", lambda name, config: listener)
    return Lab(**config), listener.heard


def test_a_policy_hears_of_every_step_of_a_request_and_of_endpoints_that_go(monkeypatch):
    lab, heard = listening(monkeypatch)
    lab.up("a", "b")
    lab.run("r", prompt("p", 40))
    lab.tell(EndpointDown, endpoint="a", cause="?")
    lab.tell(EndpointDown, endpoint="a", cause="?", removed=True)
    assert heard == [
        ("choose", "r", ["a", "b"]),
        ("placed", "r", "a"),
        ("first", "r"),
        ("ended", "r", FinishReason.STOP),
        ("gone", "a"),
    ]


def test_a_retry_is_ended_and_placed_anew_without_the_endpoint_that_failed(monkeypatch):
    lab, heard = listening(monkeypatch)
    lab.up("a", "b")
    lab.ask("r", prompt("p", 40))
    lab.finish("r", FinishReason.ENGINE_ERROR, answered=False)
    assert heard == [
        ("choose", "r", ["a", "b"]),
        ("placed", "r", "a"),
        ("ended", "r", FinishReason.ENGINE_ERROR),
        ("choose", "r", ["b"]),
        ("placed", "r", "b"),
    ]


def test_what_never_ran_is_not_heard_of(monkeypatch):
    lab, heard = listening(monkeypatch)
    lab.arrive("r", prompt("p", 40))  # no endpoint is up
    lab.finish("r", FinishReason.CLIENT_GONE, answered=False)
    assert heard == []


def test_each_model_has_a_policy_of_its_own():
    lab = Lab(policy="llmd-weighted")
    lab.up("a", "b", models=[MODEL, "other"])
    cold = [f"{MODEL} {i}" for i in range(2)]
    # Four cold prompts, alternating models: with one LRU for both they would go a, b, a, b.
    asked = [
        lab.ask(f"r{i}", prompt(name, 5 * BLOCK), model=m)
        for i, (name, m) in enumerate(
            [(cold[0], MODEL), (cold[0], "other"), (cold[1], MODEL), (cold[1], "other")]
        )
    ]
    assert asked == ["a", "a", "b", "b"]


@by_policy
def test_the_record_alone_recomputes_its_pick(policy):
    lab = Lab(policy=policy)
    lab.up("a", "b", "c", kv_tokens=30 * BLOCK)
    for i in range(60):
        lab.t += 0.3
        lab.ask(f"r{i}", prompt(i % 7, 20 * (1 + i % 11)), session=f"s{i % 5}")
        if i % 3:
            lab.first(f"r{i}", dt=0.1)
            lab.finish(f"r{i}", dt=0.1)
        if i % 10 == 0:
            lab.tell(Signals, endpoint="abc"[i % 3], scraped_t=lab.t, running=i, waiting=i % 4, kv_usage=0.5)
    decisions = lab.router.decisions(100)
    lines = [msgspec.json.encode(d) for d in decisions]
    assert [r.same for r in rerun(read_decisions(lines))] == [True] * 60
    for d in decisions:
        assert len(d.scores) == len(d.candidates)
        assert d.scores[d.pick] == min(d.scores)
        if policy in SCORERS and policy != "cost":
            assert d.scores == SCORERS[policy](d.request, d.number, d.candidates)
    assert len({d.picked.endpoint for d in decisions}) == 3


def test_what_a_policy_with_a_memory_would_do_cannot_be_asked_of_records():
    lab = Lab()
    lab.up("a", "b")
    lab.ask("r", prompt("p", 40))
    with pytest.raises(ConfigError, match="replay the events instead"):
        list(rerun(lab.router.decisions(), "dynamo-kv"))


steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "first", "finish", "fail", "gone", "back", "restart"]),
        st.integers(0, 5),
        st.integers(1, 9),
    ),
    max_size=50,
)


def placed(instructions):
    return [each.request for each in instructions if isinstance(each, Dispatch)]


@by_policy
@given(steps=steps)
@REPEATABLE
def test_when_all_is_over_no_load_is_left(policy, steps):
    lab = Lab(policy=policy)
    lab.up("a", "b", "c", kv_tokens=20 * BLOCK, process_start_s=1.0)
    running, starts = [], {}
    for n, (what, which, size) in enumerate(steps):
        lab.t += 0.5
        endpoint = "abc"[which % 3]
        if what == "ask":
            if isinstance(lab.ask(f"r{n}", prompt(which, 20 * size), session=str(which)), str):
                running.append(f"r{n}")
        elif what == "first" and running:
            lab.first(running[which % len(running)])
        elif what == "finish" and running:
            lab.finish(running.pop(which % len(running)))
        elif what == "fail" and running:
            request = running.pop(which % len(running))
            for again in lab.finish(request, FinishReason.ENGINE_ERROR, answered=False):
                if isinstance(again, Dispatch):
                    running.append(request)
        elif what == "gone":
            lab.tell(EndpointDown, endpoint=endpoint, cause="?", removed=bool(size % 2))
        elif what == "back":
            running += placed(lab.up(endpoint, kv_tokens=20 * BLOCK))
        elif what == "restart":
            starts[endpoint] = starts.get(endpoint, 1.0) + 1
            running += placed(lab.up(endpoint, process_start_s=starts[endpoint]))
    for request in running:
        lab.finish(request)
    made = lab.router._choosing._policies.get(MODEL)
    if policy == "llmd-sticky-until-saturated" and made:
        assert not made._inflight._requests
        assert not any(made._inflight._totals.values())
    if policy.startswith("dynamo-kv") and made:
        assert not made._prefill._requests
        assert not made._at
        assert not any(running.blocks for running in made._running.values())
    if policy == "session-sticky" and made:
        assert not made._running
