"""What `make bench-pd` makes of its windows, by hand."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from math import isnan
from types import SimpleNamespace

import pytest
from benchmarks.pd import __main__ as command
from benchmarks.pd import load, sides
from benchmarks.pd.figures import Curve, Loads, curve, good, goodput, loads, losses, percentile
from benchmarks.pd.load import LONG, STREAM, Window, arrivals

from sumibi.demo.streams import Heard


def heard(kind=STREAM, ttft_s=0.5, gap_s=0.03, slow=0, slow_s=0.3, asked_s=100.0, error=""):
    """An answer whose gaps are `gap_s`, the first `slow` of them `slow_s`."""
    token_s = [asked_s + ttft_s]
    for number in range(kind.output_tokens - 1):
        token_s.append(token_s[-1] + (slow_s if number < slow else gap_s))
    return Heard(kind, asked_s, token_s, error)


def window(*answers, side="a", rate=0.0, begun_s=0.0, lasted_s=10.0, decisions=None):
    return Window(side, "burst", list(answers), begun_s, lasted_s, {}, rate, 0.0, decisions or {})


def test_percentile_is_the_smallest_value_that_so_many_are_not_above():
    values = [float(n) for n in range(1, 201)]
    assert percentile(values, 0.5) == 100
    assert percentile(values, 0.99) == 198
    assert percentile([3.0], 0.99) == 3.0
    assert isnan(percentile([], 0.5))


@pytest.mark.parametrize(("answer", "is_good"), [
    (heard(), True),
    (heard(ttft_s=1.6), False),
    (heard(LONG, ttft_s=9.9), True),
    (heard(LONG, ttft_s=10.1), False),
    (heard(slow=9), True),  # of 199 gaps 9 are fewer than one in twenty
    (heard(slow=10), False),
    (heard(gap_s=0.076), False),
    (heard(error="cut"), False),
    (Heard(STREAM, 0.0), False),
    (Heard(STREAM, 0.0, heard(asked_s=0.0).token_s[:-1]), False),
])  # fmt: skip
def test_good(answer, is_good):
    assert good(answer) is is_good


def test_goodput_is_a_part_of_what_was_sent():
    assert goodput(window(heard(), heard(ttft_s=5.0), heard(), Heard(LONG, 0.0))) == 0.5


def test_only_what_came_within_the_measurement_counts():
    early = heard(asked_s=98.0, ttft_s=1.0)  # tokens from 99.0 on, 0.03 s apart
    one = window(early, begun_s=100.0, rate=230.0)
    after = sum(at_s >= 100.0 for at_s in early.token_s)
    assert one.output_tokens == after
    assert len(one.gaps_s(STREAM)) == after - 1, "the gap at the border is not whole"
    assert one.ttfts_s(STREAM) == []
    assert one.prefill_tokens_per_s == pytest.approx(230 - after / 10)


def bursts():
    """By side: p99 ITL 0.1, 0.2, 0.4, and prefill throughput 80, 95, 100 a second; apart 0.03 and 50."""
    sides = {"64": (0.1, 80), "128": (0.2, 95), "256": (0.4, 100), "apart": (0.03, 50)}
    return Curve({
        side: [window(heard(slow=5, slow_s=itl_s), side=side, rate=20 + rate)] * 2
        for side, (itl_s, rate) in sides.items()
    })  # fmt: skip


def test_a_budget_without_any_gap_is_not_the_best():
    windows = {**bursts().windows, "64": [window(rate=100.0)] * 2}
    assert Curve(windows).best(["64", "128", "256"]) == "128"


def test_the_best_budget_keeps_the_prefill_throughput():
    assert bursts().best(["64", "128", "256"]) == "128"
    found = {each.name: each for each in curve(bursts(), ["64", "128", "256"], "apart", "cmd")}
    ratio = found["burst: p99 ITL, 128 / apart"]
    assert ratio.value == pytest.approx(0.2 / 0.03, abs=1e-3)
    assert (ratio.target, ratio.held, ratio.baseline) == (5.0, True, pytest.approx(30.0))
    assert found["burst: prefill throughput, apart / 128"].value == pytest.approx(50 / 95, abs=1e-3)


def measured(**parts):
    """At 0.2 a second: by side, how many of ten are good."""
    return Loads({0.2: {
        side: [window(*[heard()] * number, *[heard(ttft_s=9.0)] * (10 - number), side=side)]
        for side, number in parts.items()
    }})  # fmt: skip


@pytest.mark.parametrize(("ours", "ratio", "near", "above"), [
    (9, 9 / 8, True, 1.0),
    (8, 1.0, True, 0.0),
    (7, 7 / 8, False, 0.0),
])  # fmt: skip
def test_the_routers_choice_is_held_against_the_better_fixed_mode(ours, ratio, near, above):
    runs = measured(whole=5, apart=8, ours=ours)
    found = {each.name: each for each in loads(runs, ["whole", "apart"], "ours", "cmd")}
    against = found["0.2 long prompts/s: goodput, ours / apart"]
    assert (against.value, against.held) == (pytest.approx(ratio), near)
    over = found["loads at which the router's choice is above both fixed modes"]
    assert (over.value, over.held) == (above, above >= 1)


def test_where_nothing_was_good_nothing_is_held():
    found = {each.name: each for each in loads(measured(whole=0, ours=0), ["whole"], "ours", "cmd")}
    against = found["0.2 long prompts/s: goodput, ours / whole"]
    assert (against.value, against.held) == (0.0, False)


def test_where_apart_loses_is_said():
    windows = {**bursts().windows, "whole": bursts().windows["128"]}
    (said,) = losses(Curve(windows), measured(whole=9, apart=8), "apart", best="whole")
    assert "goodput 0.80, aggregated 0.90" in said.value
    assert "prompt tok/s" in said.value


def test_the_command_writes_its_page_and_picture(tmp_path, monkeypatch, capsys):
    """With windows out of the air: engines and loads are for `make bench-pd`."""
    itl_s = {"aggregated, budget 64": 0.14, "aggregated, budget 128": 0.25, "aggregated, budget 2048": 3.5}

    @contextlib.contextmanager
    def running(side, model_dir, home, *, kv_blocks):
        yield SimpleNamespace(side=side)

    def burst(up, lasts_s, seed):
        name = up.side.name
        rate = 60 if name.endswith("64") else 100
        return window(heard(slow=5, slow_s=itl_s.get(name, 0.04)), side=name, rate=20 + rate)

    def loaded(up, rate, lasts_s, late_s, seed):
        bad = 5 if "aggregated" in up.side.name else 0
        answers = [heard() for _ in range(10 - bad)] + [heard(ttft_s=9.0) for _ in range(bad)]
        return window(*answers, side=up.side.name, decisions={"prefill-decode": 5.0})

    for name, fake in (("running", running), ("burst", burst), ("loaded", loaded)):
        monkeypatch.setattr(command, name, fake)
    monkeypatch.setattr(command, "model_directory", lambda *_: "nowhere")
    page = tmp_path / "RESULTS.md"
    arguments = ["pd", "--quick", "--json", str(tmp_path / "pd.json"), "--results", str(page)]
    monkeypatch.setattr("sys.argv", arguments)
    assert command.main() == 1, "the router's choice was above both nowhere"
    said = page.read_text()
    assert "best budget**: aggregated, budget 128" in said
    assert "| burst: p99 ITL, aggregated, budget 128 / prefill + decode | 6.25 x | >= 5 | yes | 40 |" in said
    assert (
        "| 0.45 long prompts/s: goodput, router's choice / prefill + decode | 1 x | >= 0.98 | yes |" in said
    )
    assert (tmp_path / "pd.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == said.strip()


def test_cpu_time_of_what_descends_from_here_is_ours():
    before_s = sides.tree_cpu_s()
    spin = (
        "import os, time; os.fork(); end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    )
    child = subprocess.Popen([sys.executable, "-c", spin + "\ntime.sleep(60)"], start_new_session=True)
    try:
        until_s = time.monotonic() + 30
        while sides.tree_cpu_s() - before_s < 0.55:
            assert time.monotonic() < until_s
            time.sleep(0.05)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert sides.busy_s() > 0.5


def test_long_steps_are_counted_from_end_to_end(monkeypatch):
    """2,000 tokens every 0.3 s, looked at whenever: never 0 or 4,000 where there was one."""
    begun_s = time.perf_counter()
    monkeypatch.setattr(
        load, "step_tokens", lambda url: 2_000.0 * ((time.perf_counter() - begun_s + 0.2) // 0.3)
    )
    first = load._edge("engine")
    time.sleep(0.5)
    second = load._edge("engine")
    assert (second.tokens - first.tokens) / (second.at_s - first.at_s) == pytest.approx(2_000 / 0.3, rel=0.2)


def test_loads_are_the_same_for_every_side():
    first, again = arrivals(0.25, 40.0, "s"), arrivals(0.25, 40.0, "s")
    assert first == again
    assert sum(each.kind is LONG for each in first) == 10
    assert sum(each.kind is STREAM for each in first) == 12
    assert all(0 <= each.at_s < 40 for each in first)
    assert len({each.seed for each in first}) == len(first)
