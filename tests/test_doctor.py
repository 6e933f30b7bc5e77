"""What the doctor says of things that are not well: each has a verdict and a fix."""

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from sumibi import doctor
from sumibi.admin import Fleet, Wire
from sumibi.core.latency import CPU_CORE_135M
from sumibi.doctor import Verdict
from sumibi.gateway.views import TransferView
from sumibi.local.runfile import ChildRecord, ChildState, RunRecord
from sumibi.pools import findings
from sumibi.routing.events import Grade, Role
from sumibi.routing.views import Counters, EndpointView
from sumibi.status import Status


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def endpoint(**changed) -> EndpointView:
    numbers = dict.fromkeys(
        ("epoch", "blocks", "inflight", "prefilling", "decoding", "prefill_tokens", "dispatched"), 0
    )
    floats = dict.fromkeys(
        (
            "wait_s",
            "foreign_running",
            "foreign_waiting",
            "fixed_factor",
            "work_factor",
            "decode_factor",
            "overhead_s",
        ),
        0.0,
    )
    unknown = dict.fromkeys(
        (
            "suspect",
            "last_sequence",
            "kv_tokens",
            "free_tokens",
            "max_sequences",
            "running",
            "waiting",
            "kv_usage",
            "scraped_t",
        )
    )
    fields = {
        "endpoint": "http://127.0.0.1:8001#0",
        "models": ["m"],
        "up": True,
        "grade": Grade.EXACT,
        "reachable": True,
        "has_events": True,
        "block_tokens": 32,
        "latency": CPU_CORE_135M,
    }
    return EndpointView(**(numbers | floats | unknown | fields | changed))


def child(**changed) -> ChildRecord:
    fields = {
        "name": "engine-0",
        "state": ChildState.READY,
        "pid": 1,
        "restarts": 0,
        "health_url": "",
        "cores": (),
        "log": "the.log",
    }
    return ChildRecord(**(fields | changed))


def running(children=(), endpoints=()) -> Status:
    stack = RunRecord(pid=1, model="m", url="http://127.0.0.1:9", admin_url="", children=list(children))
    fleet = Fleet(endpoints=list(endpoints), counters=Counters())
    return Status(running=True, ready=True, problem="", stack=stack, fleet=fleet)


@pytest.mark.parametrize(
    ("state", "verdict", "said"),
    [
        (child(), Verdict.OK, "ready"),
        (child(restarts=2, exit="signal SIGKILL"), Verdict.WARNING, "2 restarts, last signal SIGKILL"),
        (
            child(state=ChildState.FAILED, exit="exit code 3"),
            Verdict.PROBLEM,
            "failed, 0 restarts (exit code 3)",
        ),
    ],
)
def test_a_process_that_died_is_shown_with_its_log(state, verdict, said):
    (check,) = doctor.check_processes(running([state]))
    assert check.verdict is verdict
    assert said in check.found
    assert ("the.log" in check.fix) == (verdict is not Verdict.OK)


@pytest.mark.parametrize(
    ("view", "verdict", "said"),
    [
        (endpoint(), Verdict.OK, "exact"),
        (endpoint(grade=Grade.APPROXIMATE, has_events=False), Verdict.WARNING, "no KV events"),
        (endpoint(grade=Grade.APPROXIMATE), Verdict.WARNING, "a gap"),
        (endpoint(grade=Grade.NONE, suspect="refused a connection"), Verdict.WARNING, "refused a connection"),
        (endpoint(up=False), Verdict.PROBLEM, "down"),
    ],
)
def test_a_cache_that_is_not_known_exactly_is_shown_with_the_reason(view, verdict, said):
    (check,) = doctor.check_caches(running(endpoints=[view]))
    assert check.verdict is verdict
    assert said in check.found


def test_a_directory_that_cannot_be_written_is_a_problem_that_names_its_variable(tmp_path):
    assert doctor.check_writable("x", tmp_path / "not" / "yet", "XDG_STATE_HOME").verdict is Verdict.OK
    (tmp_path / "file").touch()
    check = doctor.check_writable("x", tmp_path / "file" / "state", "XDG_STATE_HOME")
    assert check.verdict is Verdict.PROBLEM
    assert "set XDG_STATE_HOME" in check.fix


@pytest.fixture
def metrics_page() -> Iterator[Callable[[str], str]]:
    """Serves a text as /metrics at the URL that it returns."""
    servers: list[HTTPServer] = []

    def serve(text: str) -> str:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Page))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,)).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("grade", "verdict", "said"),
    [
        (Grade.EXACT, Verdict.OK, "2 so far; every cache is known exactly again"),
        (Grade.APPROXIMATE, Verdict.WARNING, "2"),
    ],
)
def test_replays_that_failed_are_judged_by_how_well_caches_are_known_now(metrics_page, grade, verdict, said):
    status = running(endpoints=[endpoint(grade=grade)])
    assert status.stack is not None
    status.stack.url = metrics_page('sumibi_kv_event_replays_failed_total{endpoint="e"} 2\n')
    (check,) = doctor.check_fallbacks(status)
    assert (check.verdict, check.found) == (verdict, said)


def test_a_gateway_that_does_not_answer_is_a_problem():
    (check,) = doctor.check_fallbacks(running())
    assert check.verdict is Verdict.PROBLEM
    assert "http://127.0.0.1:9/metrics" in check.found


def test_a_port_in_use_is_a_problem_that_names_the_key(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "stack.yaml").write_text(f"gateway: {{port: {port}}}\n")
        check = doctor.check_ports()
    assert check.verdict is Verdict.PROBLEM
    assert f"127.0.0.1:{port} (Address already in use): change gateway.port" in check.found


def test_a_stack_file_with_a_typo_is_a_problem(tmp_path):
    (tmp_path / "stack.yaml").write_text("gatway: {}\n")
    assert "did you mean 'gateway'" in doctor.check_ports().found


def test_a_model_is_missing_or_half_there_or_whole(tmp_path):
    assert doctor.check_model().verdict is Verdict.WARNING
    directory = tmp_path / "sumibi/models/smollm2-135m-instruct"
    directory.mkdir(parents=True)
    manifest = Path(directory / "sumibi-manifest.json")
    manifest.write_text('{"complete": false}')
    assert doctor.check_model().verdict is Verdict.PROBLEM
    manifest.write_text('{"complete": true}')
    assert doctor.check_model().verdict is Verdict.OK


# Prefill and decode pools

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
GOOD = TransferView(connector="stream", kv_port=5601, port_from="told", told_port=5601, namespace="n")


def fleet(*engines):
    """Of (role, view, revision), numbered from 1; None as a view: nothing is known."""
    views = [
        endpoint(endpoint=f"http://{number}#0", role=role, revision=revision)
        for number, (role, _, revision) in enumerate(engines, 1)
    ]
    wire = {view.endpoint: Wire(e[1]) for view, e in zip(views, engines, strict=True) if e[1] is not None}
    return Fleet(endpoints=views, counters=Counters(), wire=wire)


def changed(**fields):
    return msgspec.structs.replace(GOOD, **fields)


def test_pools_that_fit_and_fleets_without_any():
    assert findings(fleet((P, GOOD, ""), (D, changed(told_port=0), ""))) == []
    assert findings(fleet((P, GOOD, ""), (B, GOOD, ""))) == []
    assert findings(fleet((P, GOOD, "1"), (D, GOOD, "1"), (P, GOOD, "2"))) == [], "one is being rolled out"
    assert findings(fleet((B, None, ""), (B, None, "2"))) == []
    checks = doctor.check_pools(running(endpoints=fleet((P, GOOD, ""), (D, GOOD, "")).endpoints))
    assert [(check.name, check.verdict) for check in checks] == [("pools", Verdict.OK)]
    assert doctor.check_pools(running(endpoints=[endpoint()])) == []


@pytest.mark.parametrize(
    ("engines", "works", "found", "fix"),
    [
        ([(P, GOOD, ""), (P, GOOD, "")], False, "nobody generates", "role=decode"),
        ([(D, GOOD, "")], True, "nobody computes prompts", "role=prefill"),
        ([(P, GOOD, "1"), (D, GOOD, "2")], True, "no revision has both sides", "the same revision="),
        ([(P, changed(connector=""), ""), (D, GOOD, "")], True, "nobody says how", "connector="),
        ([(P, GOOD, ""), (D, changed(connector="nixlv2"), "")], True, "different ones", "same connector="),
        (
            [(P, changed(kv_port=5600, port_from="said"), ""), (D, GOOD, "")],
            True,
            "kv_port is 5600, the engine listens at 5601",
            "set it to 5601",
        ),
        (
            [(P, changed(kv_port=5600, port_from="usual", told_port=0), ""), (D, GOOD, "")],
            True,
            "5600 is a guess",
            "kv_port=",
        ),
        ([(P, changed(told_role="kv_consumer"), ""), (D, GOOD, "")], True, "keeps nothing", "kv_producer"),
        ([(P, GOOD, ""), (D, changed(told_role="kv_producer"), "")], True, "fetches nothing", "kv_consumer"),
        (
            [(P, changed(secured=True), ""), (D, changed(secured=False), "")],
            True,
            "some have a secret",
            "the same secret_file",
        ),
        ([(P, GOOD, ""), (D, changed(namespace="other"), "")], True, "blocks differ", "same weights"),
    ],
)
def test_what_does_not_fit_is_named_with_its_fix(engines, works, found, fix):
    (finding,) = findings(fleet(*engines))
    assert found in finding.found
    assert fix in finding.fix
    assert finding.works is works
    status = running()
    status.fleet = fleet(*engines)
    (check,) = doctor.check_pools(status)
    assert check.verdict is (Verdict.WARNING if works else Verdict.PROBLEM)
    assert (check.found, check.fix) == (finding.found, finding.fix)


def test_nixlv2_needs_no_port():
    view = changed(connector="nixlv2", kv_port=0, port_from="usual", told_port=0)
    assert findings(fleet((P, view, ""), (D, view, ""))) == []


# KV that engines lost


def test_what_engines_lost_of_kv_is_named_with_its_fix(metrics_page):
    url = metrics_page(
        'sumibi:kv_transfer_failures_total{engine="0",model_name="m",reason="secret"} 3.0\n'
        'sumibi:kv_transfer_refusals_total{engine="0",model_name="m",reason="secret"} 6.0\n'
        'sumibi:kv_tier_corrupt_total{engine="0",model_name="m",tier="disk"} 22.0\n'
        'sumibi:kv_tier_corrupt_total{engine="1",model_name="m",tier="disk"} 1.0\n'
        'sumibi:kv_tier_errors_total{engine="0",model_name="m",tier="disk"} 0.0\n'
        'sumibi:kv_tier_dropped_total{engine="0",model_name="m",tier="host"} 102.0\n'
    )
    gone = endpoint(endpoint="http://127.0.0.1:1#0")
    checks = doctor.check_kv(running(endpoints=[gone, *(endpoint(endpoint=f"{url}#{i}") for i in "01")]))
    assert [(check.name, check.verdict) for check in checks] == [
        (f"KV transfers (secret) of {url}", Verdict.WARNING),
        (f"side channel (secret) of {url}", Verdict.WARNING),
        (f"KV tier (disk) of {url}", Verdict.WARNING),
        (f"KV tier (host) of {url}", Verdict.WARNING),
    ]
    assert checks[0].found.startswith("3 pulls")
    assert checks[1].found.startswith("6 peers")
    assert all("same secret_file" in check.fix for check in checks[:2])
    assert checks[2].found.startswith("23 blocks")
    assert checks[3].found.startswith("102 blocks found no room")
    assert "host_bytes" in checks[3].fix
    assert doctor.check_kv(running(endpoints=[gone])) == []


@pytest.mark.parametrize("installed", [True, False])
def test_where_a_gateway_runs_by_itself_no_engine_is_missed(monkeypatch, tmp_path, installed):
    fleet = Fleet(endpoints=[endpoint()], counters=Counters())
    status = Status(
        running=False, ready=True, problem="", stack=None, fleet=fleet, by_hand="http://127.0.0.1:1"
    )
    monkeypatch.setattr(doctor, "read_status", lambda *_: status)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if installed else None)
    names = {check.name: check.verdict for check in doctor.examine(tmp_path)}
    assert ("torch" in names, "model" in names, "engine" in names) == (installed, installed, not installed)
    assert installed or Verdict.PROBLEM not in names.values()
