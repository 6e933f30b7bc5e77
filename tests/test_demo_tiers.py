"""The demonstration of KV tiers: its script and its judgement, without engines."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from sumibi.cli import machine
from sumibi.core.errors import EngineUnavailable
from sumibi.demo.lone import LoneEngine
from sumibi.demo.texts import Texts
from sumibi.demo.tiers_report import print_tables, said, write_json, write_picture
from sumibi.demo.tiers_script import KV_BLOCKS, TTFT_AT_MOST, Played, computed_s, judge, script

WORDS = Texts(lambda text: len(text.split()), 1)


def size(messages):
    return sum(len(message["content"].split()) for message in messages)


@pytest.fixture
def played():
    """What should come out of it: prompts found in whole blocks, at the speed of tiers."""
    turns = []
    before = {}
    for turn in script(WORDS):
        tokens = size(turn.messages)
        name = turn.label[0]
        found = before.get(name, 0) // 32 * 32 if turn.wanted != "computed" else 0
        before[name] = tokens
        turns.append(
            Played(
                side=turn.side,
                label=turn.label,
                wanted=turn.wanted,
                prompt_tokens=tokens,
                cached_by_tier={turn.wanted: found} if found else {},
                ttft_s=0.1 + (tokens - found) / 1000,
                killed_before=turn.restart_first,
            )
        )
    return turns


def test_each_turn_of_a_conversation_begins_with_the_one_before_and_one_conversation_fits():
    turns = script(WORDS)
    for side in ("off", "on"):
        mine = [turn.messages for turn in turns if turn.side == side and turn.label.startswith("A")]
        for before, after in pairwise(mine):
            assert after[: len(before)] == before
        least = min(size(turn.messages) for turn in turns)
        assert size(mine[-1]) < KV_BLOCKS * 32 < 2 * least
    # Both sides compute the same first turns.
    firsts = [[t.messages for t in turns if t.side == side and "turn 1" in t.label] for side in ("off", "on")]
    assert firsts[0] == firsts[1]
    assert len(firsts[0]) == 5
    assert [turn.label for turn in turns if turn.restart_first] == ["A, turn 4"]


def test_claims_hold_where_tiers_do_what_they_should(played):
    claims = judge(played)
    assert len(claims) == 7
    assert all(claim.held for claim in claims)


@pytest.mark.parametrize(
    ("label", "change", "lost"),
    [
        ("A, turn 3", {"cached_by_tier": {"disk": 2000}}, "that host gave"),
        ("A, turn 4", {"cached_by_tier": {"disk": 1900}}, "that disk gave, after kill -9"),
        ("A, turn 5", {"cached_by_tier": {}}, "that device gave"),
        ("A, turn 3", {"ttft_s": 0.27}, "TTFT from host / computed"),
        ("A, turn 4", {"ttft_s": 0.44}, "TTFT from disk / computed"),
    ],
)
def test_a_claim_falls_with_its_measurement(played, label, change, lost):
    changed = [replace(t, **change) if (t.side, t.label) == ("on", label) else t for t in played]
    (fallen,) = [claim for claim in judge(changed) if not claim.held]
    assert lost in fallen.name


def test_without_tiers_something_found_is_a_claim_lost(played):
    changed = [
        replace(t, cached_by_tier={"device": 200}) if (t.side, t.label) == ("off", "A, turn 2") else t
        for t in played
    ]
    (fallen,) = [claim for claim in judge(changed) if not claim.held]
    assert "without tiers" in fallen.name


def test_what_is_shown_names_every_turn_and_claim(played, tmp_path, capsys):
    claims = judge(played)
    print_tables(played, claims)
    shown = capsys.readouterr().out
    assert all(claim.name in shown for claim in claims)
    assert "kill -9" in shown
    write_json(tmp_path / "demo-tiers.json", played, claims)
    written = json.loads((tmp_path / "demo-tiers.json").read_text())
    assert [(step["side"], step["label"]) for step in written["steps"]] == [(t.side, t.label) for t in played]
    assert len(written["claims"]) == 7


@pytest.mark.parametrize(
    ("cached", "line"),
    [
        ({}, "2008 tokens: all computed"),
        ({"host": 1984}, "2008 tokens: 1984 from host memory, 24 computed"),
        ({"device": 96, "disk": 1888}, "2008 tokens: 96 from device, 1888 from disk, 24 computed"),
    ],
)
def test_a_turn_s_line_says_what_was_computed_and_where_the_rest_came_from(played, cached, line):
    assert said(replace(played[0], prompt_tokens=2008, cached_by_tier=cached)) == line


def test_the_picture_s_labels_are_clear_of_the_dashed_lines(played, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, path, **_: drawn.append(self))
    # The worst: as slow as is claimed, and a little faster.
    for share in (1.0, 0.8):
        turns = [
            replace(t, ttft_s=share * TTFT_AT_MOST[t.wanted] * computed_s(played))
            if t.wanted in TTFT_AT_MOST
            else t
            for t in played
        ]
        write_picture(tmp_path / "x.png", turns, judge(turns))
        (axes,) = drawn.pop().axes
        axes.figure.draw_without_rendering()
        boxes = [
            text.get_window_extent() for text in axes.texts if text.get_text().replace(".", "").isdigit()
        ]
        lines = [line.get_window_extent() for line in axes.lines if line.get_linestyle() == "--"]
        assert (len(boxes), len(lines)) == (len(played), 2)
        assert not any(box.overlaps(line) for box in boxes for line in lines)


@pytest.mark.parametrize("json_only", [False, True])
def test_the_last_line_says_what_was_written_and_json_stays_json(tmp_path, monkeypatch, capsys, json_only):
    files = [tmp_path / "x.json", tmp_path / "x.png"]
    files[0].write_text("{}")
    shown = machine._Shown(True, files, lambda: print("tables"))
    monkeypatch.setitem(machine._SHOWS, machine.Demo.TIERS, lambda *_: shown)
    with pytest.raises(typer.Exit):
        machine.demo(machine.Demo.TIERS, tmp_path, "tiny", json_only)
    output = capsys.readouterr()
    written = f"written: {files[0]}, {files[1]}\n"
    assert output.out == ("{}" if json_only else f"tables\n{written}")
    assert json_only == (written in output.err)


def test_the_log_has_what_was_started_and_what_it_said(tmp_path):
    log = tmp_path / "log"
    with LoneEngine(Path("tiny"), kv_blocks=16, threads=1, log=log) as engine:
        assert log.read_text().splitlines()[-1] == f"sumibi engine: tiny is ready on {engine.url}"
    wrong = LoneEngine(Path("tiny"), kv_blocks=16, threads=1, tiers={"host_bytes": "1 parsec"}, log=log)
    with pytest.raises(EngineUnavailable, match=f"see {log}"):
        wrong.start()
    nothing, first, second = log.read_text().split("$ ")
    assert not nothing
    assert "--kv-blocks 16" in first.splitlines()[0]
    assert "1 parsec" in second.splitlines()[0]
    assert "'1 parsec' is not a size" in " ".join(second.splitlines()[1:])
