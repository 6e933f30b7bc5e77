"""The demonstration of KV tiers, played: one engine without them, then one with them; files are written."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from sumibi.demo.claims import Demonstration
from sumibi.demo.client import ask
from sumibi.demo.lone import LoneEngine, cores
from sumibi.demo.run import make_directory
from sumibi.demo.texts import Texts
from sumibi.demo.tiers_report import said, write_json, write_picture
from sumibi.demo.tiers_script import (
    DISK_BYTES,
    HOST_BYTES,
    KV_BLOCKS,
    SEED,
    Played,
    Side,
    Turn,
    judge,
    script,
)
from sumibi.local.runfile import default_state_dir
from sumibi.local.updown import Report, model_directory
from sumibi.prompts.tokenizer import Tokenizer

_ANSWER_TOKENS = 8
_MODEL_TOKENS = (KV_BLOCKS - 1) * 32
_CORES = 2


def run_demo(model: str, out: Path, report: Report) -> Demonstration[Played]:
    """Play everything and write `demo-tiers.json` and `demo-tiers.png` into `out`.

    Raises EngineUnavailable if an engine does not start or a request fails, EnvironmentProblem if `out` or
    the directory for blocks cannot be written.
    """
    scratch = default_state_dir() / "demo-tiers"
    for path in (out, scratch):
        make_directory(path)
    directory = model_directory(model, report)
    tokenizer = Tokenizer.load(directory)
    turns = script(Texts(lambda text: len(tokenizer.encode(text, add_special_tokens=False)), SEED))
    log = out / "demo-tiers.log"
    log.unlink(missing_ok=True)
    flags = ["--max-model-len", str(_MODEL_TOKENS)]
    threads = len(cores(_CORES))
    played: list[Played] = []
    with tempfile.TemporaryDirectory(dir=scratch) as blocks:
        tiers = {"host_bytes": HOST_BYTES, "disk": {"path": blocks, "bytes": DISK_BYTES}}
        sides: tuple[tuple[Side, dict[str, object] | None], ...] = (("off", None), ("on", tiers))
        for side, below in sides:
            report("engine", f"starting, tiers {side}", None)
            engine = LoneEngine(
                directory, kv_blocks=KV_BLOCKS, threads=threads, tiers=below, flags=flags, log=log
            )
            with engine:
                mine = [turn for turn in turns if turn.side == side]
                played += _play(engine, mine, len(played), len(turns), report)
            report("engine", f"tiers {side}: done", 1.0)
    claims = judge(played)
    write_json(out / "demo-tiers.json", played, claims)
    write_picture(out / "demo-tiers.png", played, claims)
    return Demonstration(played, claims)


def _play(engine: LoneEngine, turns: Iterable[Turn], done: int, total: int, report: Report) -> list[Played]:
    played = []
    _warm_up(engine)
    for turn in turns:
        if turn.restart_first:
            engine.wait_written(int(engine.tier_counts()["blocks", "host"]), "disk")
            engine.kill()
            report("engine", "killed (kill -9), starting again", None)
            engine.start()
            _warm_up(engine)
        answer = ask(engine.url, engine.model, turn.messages, _ANSWER_TOKENS)
        result = Played(
            side=turn.side,
            label=turn.label,
            wanted=turn.wanted,
            prompt_tokens=answer.prompt_tokens,
            cached_by_tier={tier: tokens for tier, tokens in answer.cached_by_tier.items() if tokens},
            ttft_s=answer.ttft_s,
            killed_before=turn.restart_first,
        )
        played.append(result)
        report(
            f"tiers {turn.side}",
            f"turn {done + len(played)} of {total}: {turn.label}: {said(result)}, first token after "
            f"{answer.ttft_s:.3f} s",
            None,
        )
    return played


def _warm_up(engine: LoneEngine) -> None:
    """The first answer of a process is slower, whatever lies in its caches; this one has no whole block."""
    ask(engine.url, engine.model, [{"role": "user", "content": "Hello"}], 1)
