"""Logs that are bounded, and that no disk can make serving fail."""

import json

from sumibi.gateway.jsonl import JsonlLog


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_in_order(tmp_path):
    log = JsonlLog(tmp_path / "deep" / "log.jsonl")
    log.append({"n": 1})
    log.append({"n": 2})
    assert not log.path.exists()
    log.flush()
    log.append({"n": 3})
    log.flush()
    assert lines(log.path) == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert (log.written, log.dropped) == (3, 0)


def test_full_files_move_up_and_the_oldest_goes(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl", max_file_bytes=30, keep_files=3)
    for number in range(12):
        log.append({"number": number})
        log.flush()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["log.jsonl", "log.jsonl.1", "log.jsonl.2"]
    kept = [r["number"] for name in reversed(files) for r in lines(tmp_path / name)]
    assert kept == list(range(kept[0], 12))
    assert all((tmp_path / name).stat().st_size <= 30 for name in files)


def test_a_disk_that_fails_costs_records_is_counted_and_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    log = JsonlLog(tmp_path / "file" / "log.jsonl")  # a file where the directory should be
    for _ in range(3):
        log.append({})
        log.flush()
    assert (log.written, log.dropped) == (0, 3)
    assert len(caplog.records) == 1
    assert "log.jsonl" in caplog.text
    (tmp_path / "file").unlink()
    log.append({})
    log.flush()
    assert log.written == 1


def test_records_beyond_what_may_wait_are_dropped_and_counted(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    for number in range(50_010):
        log.append(number)
    log.flush()
    assert (log.written, log.dropped) == (50_000, 10)
