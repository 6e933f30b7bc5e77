"""What a prompt's keys cost: a conversation that comes again, one that has grown by a turn, and a new one.

CPU time of parsing the body and finding its keys, with the default model's tokenizer and template. The
target for a grown conversation is over encoding the new turn alone, measured beside it with the same words.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sumibi.bench import report
from sumibi.engine.fetch import DEFAULT_MODEL, ensure_model
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

HERE = Path(__file__).parent
SEED = 20_261
BODY_BYTES = 128 << 10
REPEATS = 60
SAMPLE = (
    "the cache holds blocks of tokens and each is named by a chain of hashes so that a prefix can be found "
    'again when def read(path): return [line for line in open(path)] {"name": "search", "limit": 10} # 2026'
)
WORDS = SAMPLE.split()


def words(rng: random.Random, characters: int) -> str:
    """Text of about so many characters."""
    text = ""
    while len(text) < characters:
        text += rng.choice(WORDS) + rng.choice(("  \n" if rng.random() < 0.1 else " ", " "))
    return text


def conversation(rng: random.Random) -> list[dict[str, object]]:
    """An agent's messages: question, tool calls, results, answer, and again."""
    messages: list[dict[str, object]] = [{"role": "system", "content": words(rng, 6000)}]
    while len(json.dumps(messages)) < BODY_BYTES:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"path": "a.py"}'}}
        messages += [
            {"role": "user", "content": words(rng, 300)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": words(rng, 1500), "tool_call_id": "c"},
            {"role": "assistant", "content": words(rng, 500)},
        ]
    return messages


def body(messages: list[dict[str, object]]) -> bytes:
    """The request."""
    return json.dumps({"model": "m", "messages": messages, "stream": True}).encode()


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU milliseconds of doing it once."""
    start = time.process_time_ns()
    work()
    return (time.process_time_ns() - start) / 1e6


def measure(directory: Path, cmd: str) -> list[report.Figure]:
    """All figures."""
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer)
    reader = PromptReader(tokenizer, template)
    rng = random.Random(SEED)
    known = conversation(rng)

    def read(request: bytes) -> float:
        return cpu_ms(lambda: reader.read(parse_request("/v1/chat/completions", request)))

    first = read(body(known))
    again = [read(body(known)) for _ in range(REPEATS)]
    over, alone = [], []
    for number in range(REPEATS):
        turn = [
            {"role": "assistant", "content": words(rng, 500)},
            {"role": "user", "content": words(rng, 900)},
        ]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in turn)
        request = body([*known, *turn])
        # Whoever comes second finds the words in the tokenizer's own cache: take turns.
        encode = lambda text=text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        if number % 2:
            whole, part = read(request), cpu_ms(encode)
        else:
            part, whole = cpu_ms(encode), read(request)
        over.append(whole - part)
        alone.append(part)
    stats = reader.stats()
    assert (stats.whole - stats.checks, stats.seen, stats.grown) == (1, REPEATS, REPEATS)
    return [
        report.machine(),
        report.statement("command", cmd),
        report.statement(
            "workload",
            f"{len(known)} messages, {len(body(known)) >> 10} KB, seed {SEED}; a turn adds about 1.4 KB; "
            f"{DEFAULT_MODEL}; CPU time, parsing the body included; a check in 100 not left out",
        ),
        report.statement("not measured", "other templates; several threads; memory"),
        report.figure("conversation again", again, "ms", at_most=0.5, cmd=cmd),
        report.figure("grown by a turn, over encoding the turn", over, "ms", at_most=0.5, cmd=cmd),
        report.figure("encoding the turn", alone, "ms", cmd=cmd),
        report.figure("conversation the first time", [first], "ms", cmd=cmd),
    ]


def main() -> int:
    """Run, write `--json` and RESULTS.md; exit code 0 if every target held."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.prompts", description=__doc__)
    arguments.add_argument("--json", type=Path, default=Path("out/bench-prompts.json"))
    chosen = arguments.parse_args()
    figures = measure(ensure_model(DEFAULT_MODEL), "python -m benchmarks.prompts")
    return report.finish(figures, chosen.json, HERE / "RESULTS.md", "Prompt keys")


if __name__ == "__main__":
    sys.exit(main())
