"""What a person reads stays readable where there is little room."""

from sumibi import console
from sumibi.admin import Fleet
from sumibi.local.runfile import ChildRecord, ChildState, RunRecord
from sumibi.routing.views import Counters
from sumibi.status import Status


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
