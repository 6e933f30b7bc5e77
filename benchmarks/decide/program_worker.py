"""One program of thousands of turns with forks and resets: does a late turn cost more than an early one?

Text as an agent sends it, whole at every turn, through the reader of prompts; its blocks in an index; and
the sessions that the router recognises. All turns add the same number of characters.

The program is played twice at once, by two readers: when the one is near its end the other is near its early
turns, and from there on they take turns, so that the machine was the same to both.
"""

import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.decide import content
from benchmarks.decide.worker import Results, Tasks, serve
from benchmarks.prompts.__main__ import WORDS

import sumibi
from sumibi.engine.fetch import DEFAULT_MODEL, ensure_model
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer
from sumibi.routing.index import BlockIndex
from sumibi.routing.sessions import Programs

TURNS, FORKS, RESETS = 3_000, 40, 5
FORK_TURNS = 8
"""Turns of a fork, counted among the program's."""
EARLY, LATE = 300, 3_000
WINDOW = 40
"""Turns of the program itself that are compared, up to these."""
PREAMBLE_WORDS, RESULT_WORDS, ANSWER_WORDS, SUMMARY_WORDS = 4_000, 90, 40, 1_000


@dataclass(slots=True)
class Turn:
    """What one turn took."""

    number: int
    forked: bool
    key_us: float
    index_bytes: int
    """Added."""
    session_tips: int
    """Conversations' ends remembered, added."""
    blocks: int
    """Of the prompt."""


@dataclass(slots=True)
class Run:
    """A program being played."""

    reader: PromptReader
    index: BlockIndex
    programs: Programs
    rng: random.Random
    turns: list[Turn] = field(default_factory=list)

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=count))

    def turn(self, messages: list[dict[str, str]], *, forked: bool) -> None:
        """A result comes, the agent asks; the answer is part of the next turn."""
        messages.append({"role": "user", "content": self.words(RESULT_WORDS)})
        body = json.dumps({"model": "m", "messages": messages, "stream": True}).encode()
        begun = time.process_time_ns()
        prompt = self.reader.read(parse_request("/v1/chat/completions", body))
        took = time.process_time_ns() - begun
        keys = prompt.keys
        known = sum(blocks for blocks, _ in self.index.match(keys, len(keys), 1))
        before, tips = self.index.estimated_bytes, len(self.programs)
        self.programs.recognise(keys, known)
        self.index.add(0, None, keys)
        added, tips = self.index.estimated_bytes - before, len(self.programs) - tips
        self.turns.append(Turn(len(self.turns) + 1, forked, took / 1e3, added, tips, len(keys)))
        messages.append({"role": "assistant", "content": self.words(ANSWER_WORDS)})


def _start() -> Run:
    directory = ensure_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.load(directory)
    run = Run(
        PromptReader(tokenizer, ChatTemplate.load(directory, tokenizer), block_tokens=content.BLOCK_TOKENS),
        BlockIndex(content.BLOCKS),
        Programs(),
        random.Random(content.SEED),
    )
    run.index.new_holder()
    return run


def _play(run: Run) -> Iterator[int]:
    """Play it; yields the number of each of the program's own turns, its forks played too."""
    own = TURNS - FORKS * FORK_TURNS
    forked = set(run.rng.sample(range(own), FORKS))
    resets = {own * (i + 1) // (RESETS + 1) for i in range(RESETS)}
    preamble = {"role": "system", "content": run.words(PREAMBLE_WORDS)}
    messages = [preamble]
    for number in range(own):
        if number in resets:
            messages = [preamble, {"role": "user", "content": run.words(SUMMARY_WORDS)}]
            messages.append({"role": "assistant", "content": run.words(ANSWER_WORDS)})
        run.turn(messages, forked=False)
        if number in forked:
            branch = list(messages)
            for _ in range(FORK_TURNS):
                run.turn(branch, forked=True)
        yield len(run.turns)
    assert len(run.turns) == TURNS


def _play_both() -> tuple[Run, Run]:
    """One that is played to its early turns, and one to its late ones."""
    early, late = _start(), _start()
    beginning, end = _play(early), _play(late)
    before = WINDOW + 2 * FORK_TURNS
    next(number for number in end if number >= LATE - before)
    next(number for number in beginning if number >= EARLY - before)
    for _ in end:
        if len(early.turns) < EARLY:
            next(beginning)
    while len(early.turns) < EARLY:
        next(beginning)
    return early, late


def _around(run: Run, last: int) -> list[Turn]:
    own = [turn for turn in run.turns if not turn.forked and turn.number <= last]
    return own[-WINDOW:]


def _make() -> tuple[Tasks, str]:
    def program(_: int) -> Results:
        early, late = _play_both()
        results: Results = {}
        for name, run, last in (("early", early, EARLY), ("late", late, LATE)):
            turns = _around(run, last)
            results[f"{name}_key_us"] = statistics.median(turn.key_us for turn in turns)
            results[f"{name}_index_bytes"] = statistics.mean(turn.index_bytes for turn in turns)
            results[f"{name}_session_tips"] = statistics.mean(turn.session_tips for turn in turns)
            results[f"{name}_blocks"] = turns[-1].blocks
        return results

    return {"program": program}, f"sumibi {sumibi.__version__}, {DEFAULT_MODEL}"


if __name__ == "__main__":
    serve(_make)
