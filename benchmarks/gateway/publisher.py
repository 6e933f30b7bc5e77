"""KV events for engines that publish none: what each of them would hold after the kit's requests.

Every worker's cache is full: the blocks of the prompts that it was given (request number modulo workers, all
turns of a conversation at one of them), then blocks of prompts that nobody asks for. Says it the way vLLM
does: maps of at most 16 blocks, from a PUB socket with a replay socket beside it.
"""

import argparse
import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from sumibi.core.kvevents import REPLAY_END, BlockStored, encode_batch
from sumibi.prompts.dialects import parse_request
from sumibi.prompts.keys import PromptReader
from sumibi.prompts.template import ChatTemplate
from sumibi.prompts.tokenizer import Tokenizer

BLOCK_TOKENS = 16
BATCH_BLOCKS = 16
FILLER_BLOCKS = 2048
"""Of one prompt that nobody asks for."""
VOCABULARY = 40_000


class Worker:
    """One engine's cache, and the batches that told of it."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []
        self.blocks = 0
        self._held: set[bytes] = set()

    def hold(self, token_ids: Sequence[int], limit: int) -> None:
        """Store the full blocks of a prompt that are not here yet, as long as there is room."""
        hashes = list(block_hashes(token_ids))
        first = next((at for at, name in enumerate(hashes) if name not in self._held), len(hashes))
        hashes = hashes[: first + limit - self.blocks]
        for at in range(first, len(hashes), BATCH_BLOCKS):
            some = hashes[at : at + BATCH_BLOCKS]
            tokens = list(token_ids[at * BLOCK_TOKENS : (at + len(some)) * BLOCK_TOKENS])
            parent = hashes[at - 1] if at else None
            event = BlockStored(list(some), parent, tokens, BLOCK_TOKENS, medium="GPU")
            self.batches.append(encode_batch(0.0, [event]))
        self._held.update(hashes[first:])
        self.blocks += len(hashes) - first


def block_hashes(token_ids: Sequence[int]) -> Iterator[bytes]:
    """Chained hashes, 8 bytes each: opaque to everyone but this process."""
    parent = b""
    for at in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = b",".join(b"%d" % token for token in token_ids[at : at + BLOCK_TOKENS])
        parent = hashlib.blake2b(parent + block, digest_size=8).digest()
        yield parent


def fill(bodies: list[Path], tokenizer: Path, workers: int, blocks_each: int, seed: int) -> list[Worker]:
    """The caches after the requests of `bodies`."""
    tokens = Tokenizer.load(tokenizer)
    template = ChatTemplate.load(tokenizer, tokens)
    reader = PromptReader(tokens, template, block_tokens=BLOCK_TOKENS, keep_token_ids=True)
    caches = [Worker() for _ in range(workers)]
    for path in bodies:
        for number, line in enumerate(path.read_bytes().splitlines()):
            prompt = reader.read(parse_request("/v1/chat/completions", line))
            caches[number % workers].hold(prompt.token_ids or [], blocks_each)
    for number, cache in enumerate(caches):
        chance = random.Random(seed * workers + number)
        while cache.blocks < blocks_each:
            cache.hold(chance.choices(range(VOCABULARY), k=FILLER_BLOCKS * BLOCK_TOKENS), blocks_each)
    return caches


def main() -> None:
    """Publish and answer replays until `--seconds` have passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bodies", type=Path, nargs="+", required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--blocks-each", type=int, required=True)
    parser.add_argument("--ports", type=int, nargs=2, required=True, help="first of PUB, first of replay")
    parser.add_argument("--seed", type=int, default=20265)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    caches = fill(options.bodies, options.tokenizer, options.workers, options.blocks_each, options.seed)
    context, poller = zmq.Context(), zmq.Poller()
    publishers, replays = [], {}
    for number, cache in enumerate(caches):
        publisher = context.socket(zmq.PUB)
        publisher.bind(f"tcp://127.0.0.1:{options.ports[0] + number}")
        publishers.append((publisher, cache))
        replay = context.socket(zmq.ROUTER)
        replay.bind(f"tcp://127.0.0.1:{options.ports[1] + number}")
        poller.register(replay, zmq.POLLIN)
        replays[replay] = cache
    print("blocks", sum(cache.blocks for cache in caches), flush=True)
    end = time.monotonic() + options.seconds
    while (left_s := end - time.monotonic()) > 0:
        for replay, _ in poller.poll(1000 * min(left_s, 1.0)):
            peer, _, start = replay.recv_multipart()
            batches = replays[replay].batches
            for number in range(int.from_bytes(start, "big"), len(batches)):
                replay.send_multipart([peer, b"", b"", number.to_bytes(8, "big"), batches[number]])
            replay.send_multipart([peer, b"", b"", REPLAY_END.to_bytes(8, "big"), b""])
    context.destroy(linger=0)


if __name__ == "__main__":
    main()
