"""What a person reads stays readable where there is little room."""

import msgspec
import pytest

from sumibi import console
from sumibi.admin import Fleet, Sample
from sumibi.local.runfile import ChildRecord, ChildState, RunRecord
from sumibi.routing.events import EndpointUp, Grade
from sumibi.routing.router import Router
from sumibi.routing.views import Counters
from sumibi.status import Status, TierStatus, tiers_on


def test_why_a_process_ended_stands_whole_on_a_line_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    why = "exit code 3 after 2 s, then signal SIGKILL"
    child = ChildRecord(
        name="engine-0",
        state=ChildState.FAILED,
        pid=None,
        restarts=9,
        health_url="",
        cores=(),
        log="",
        exit=why,
    )
    stack = RunRecord(pid=1, model="m", url="http://u", admin_url="", children=[child])
    fleet = Fleet(endpoints=[], counters=Counters())
    status = Status(running=True, ready=False, problem="", stack=stack, fleet=fleet)
    console.print_status(status, json=False)
    assert f"engine-0: last end: {why}\n" in capsys.readouterr().out


def endpoint(name, **fields):
    """A new endpoint, as the router shows it; then with `fields`."""
    router = Router()
    router.handle(EndpointUp(t=0.0, endpoint=name, models=["m"], has_events=True))
    (seen,) = router.fleet_view()
    return msgspec.structs.replace(seen, **fields)


def shown_at_80_columns(status, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    console.print_status(status, json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def of_fleet(*endpoints, **fields):
    fleet = Fleet(endpoints=list(endpoints), counters=Counters())
    return Status(running=True, ready=True, problem="", stack=None, fleet=fleet, **fields)


def test_a_usual_fleet_is_a_table_of_one_line_an_endpoint_at_80_columns(monkeypatch, capsys):
    full = {"blocks": 4096, "block_tokens": 32, "kv_tokens": 131072, "grade": Grade.APPROXIMATE}
    status = of_fleet(*(endpoint(f"http://127.0.0.1:{port}#0", **full) for port in (18001, 18002)))
    lines = shown_at_80_columns(status, monkeypatch, capsys)
    for port in ("18001", "18002"):
        (row,) = [line.split() for line in lines if port in line]
        assert row == [f"127.0.0.1:{port}", "both", "yes", "approximate", "131072/131072", "0", "0.00"]


def test_what_does_not_fit_a_table_is_said_whole(monkeypatch, capsys):
    name = "engine-0.engines.default.svc.cluster.local:8000"
    lines = shown_at_80_columns(
        of_fleet(endpoint(f"http://{name}#0", wait_s=1.25, grade=Grade.EXACT)), monkeypatch, capsys
    )
    assert " ".join(" ".join(lines).split()) == (
        f"{name}: role both, up yes, cache known exact, tokens cached 0/?, requests 0, wait s 1.25"
    )


def test_tiers_are_shown_with_what_they_hold_and_are_worth(monkeypatch, capsys):
    host = TierStatus(tier="host", bytes=1 << 30, limit_bytes=2 << 30, blocks=1234, prompt_share=0.234)
    status = of_fleet(kv_tiers={"http://127.0.0.1:8001": [host]})
    (line,) = [line for line in shown_at_80_columns(status, monkeypatch, capsys) if "host" in line]
    assert " ".join(line.split()) == "127.0.0.1:8001 host 1 GiB of 2 GiB 1234 23.4%"
    console.print_status(status, json=True)
    (told,) = msgspec.json.decode(capsys.readouterr().out)["kv_tiers"]["http://127.0.0.1:8001"]
    assert told == msgspec.to_builtins(host)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5 TiB")],
)
def test_sizes_have_three_digits_and_a_unit(size, text):
    assert console._size(size) == text


def test_an_engine_s_page_tells_its_tiers_all_ranks_together():
    page = [
        Sample(f"sumibi:kv_tier_{name}", {"engine": rank, "tier": tier}, value)
        for rank in ("0", "1")
        for tier, limit in (("host", 100.0), ("disk", 0.0), ("store", 1000.0))
        for name, value in (("limit_bytes", limit), ("bytes", limit / 2), ("blocks", limit / 10))
    ]
    page += [Sample("vllm:prompt_tokens_total", {"engine": rank}, 400.0) for rank in ("0", "1")]
    page += [
        Sample("vllm:prompt_tokens_cached_by_source_total", {"engine": "0", "source": source}, value)
        for source, value in (("device", 300.0), ("host", 80.0), ("external_unspecified", 200.0))
    ]
    assert tiers_on(page) == [
        TierStatus(tier="host", bytes=100, limit_bytes=200, blocks=20, prompt_share=0.1),
        TierStatus(tier="store", bytes=1000, limit_bytes=2000, blocks=200, prompt_share=0.25),
    ]
    assert tiers_on([]) == []
