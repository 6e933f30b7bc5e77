"""W12: KV that another replica has, fetched instead of computed again. Three experiments and a control.

All are llm-d's ("P2P KV cache sharing", guide and article of Aug 2026). Replicas that read one another's
host memory are played as a store of all these memories, read at the published speed of a pull by each.
"""

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from sumibi.bench.effects import BLIND, Row, median_ttft, output_rate, play, row, run_of, scraped
from sumibi.bench.grid import fleet
from sumibi.bench.workloads.fetching import coding, documents
from sumibi.sim.fleet import FleetSpec, Group, HostTier, LinkSpec, Store
from sumibi.sim.results import Run, Summary
from sumibi.sim.workload import Workload

OSS_KV_BYTES = 41_500
"""Of a token of gpt-oss-120b, as llm-d measured: half of its layers keep 128 tokens."""
TCP_PULL_S, TCP_TOKEN_S = 0.020, 15.66e-6
"""gpt-oss-120b over TCP: 52 ms for 2,048 tokens, 533 ms for 32,768."""
RDMA_PULL_S, RDMA_GB_PER_S = 0.026, OSS_KV_BYTES / 4.3e-6 / 1e9
"""The same with RDMA: 26 ms and 4.3 us a token."""
GLM_PULL_S, GLM_TOKEN_S = 1.25, 8.8e-6
"""GLM-5.2: 1,171 ms for 8,192 tokens, 1,315 ms for 24,576, and a floor of 1.2 to 1.3 s."""
DOCUMENT_ANSWER_TOKENS, CODING_ANSWER_TOKENS = 256, 425
C64_WINDOW_S = 3_600.0


def w12() -> Iterator[Row]:
    """Documents on replicas together, and coding sessions on separate pools."""
    recomputed, fetched = (
        play(documents(users=64, sessions=96), _eight(pull), BLIND) for pull in (False, True)
    )
    yield _requests(
        "W12",
        "documents, 8 together, placed in turn: requests, recompute -> fetch",
        DOCUMENT_ANSWER_TOKENS,
        (recomputed, fetched),
        "2.80 -> 4.43 requests/s",
    )
    plain, fetched = (play(coding(), _pools(pull), BLIND) for pull in (False, True))
    what = "coding sessions, 2P + 4D"
    published = "6.83 -> 1.09 s"
    yield row(
        "W12",
        f"{what}: median TTFT, recompute -> host tier and fetch",
        median_ttft,
        plain,
        fetched,
        published,
    )
    yield _requests(
        "W12",
        f"{what}: requests, recompute -> host tier and fetch",
        CODING_ANSWER_TOKENS,
        (plain, fetched),
        "0.82 -> 1.24 requests/s",
    )


def w12_controls() -> Iterator[Row]:
    """Fetching wherever a request lands must not beat keeping it where its document is."""
    played = documents(users=64, sessions=96)
    fetched, kept = play(played, _eight(True), BLIND), play(played, _eight(False), "llmd-precise")
    yield _requests(
        "controls",
        "W12 documents: requests, fetched wherever they land -> kept where they are cached",
        DOCUMENT_ANSWER_TOKENS,
        (fetched, kept),
        "4.43 -> 5.46 requests/s",
    )


def c64(agents: Workload) -> Iterator[Row]:
    """64 agents on four GLM-5.2 replicas: llm-d's approximate index, against its precise one and fetching.

    Published for 2P + 2D, in the first 300 s. These policies make no pairs, so the same GPUs serve together
    here; and first prompts of sessions begun at once take 300 s, so it is the first hour that is counted.
    """
    together = fleet("glm52-8xh200", count=4, host=HostTier(tokens=9_000_000, gb_per_s=20.0))
    kv_bytes = together.groups[0].kv_bytes_per_token
    pulls_gb_per_s = 8 * kv_bytes / GLM_TOKEN_S / 1e9  # each of a replica's eight ranks pulls for itself
    store = _peers(36_000_000, pulls_gb_per_s, GLM_PULL_S, readers=4)
    played = replace(agents, start_spread_s=10.0)
    before = run_of(played, together, "llmd-weighted", 64)
    after = run_of(played, msgspec.structs.replace(together, store=store), "llmd-precise", 64)
    yield Row(
        "W12",
        "64 agents, GLM-5.2: requests, approximate index -> precise index and fetch",
        True,
        False,
        _over_per_s(before),
        _over_per_s(after),
        "requests/s",
        "2.890 -> 3.210 requests/s",
    )


def _over_per_s(run: Run) -> float:
    calls = run.calls
    end_s = min(calls.arrival_s) + C64_WINDOW_S
    return sum(calls.end_s[i] <= end_s for i in calls.done()) / C64_WINDOW_S


def _requests(
    group: str, what: str, answer_tokens: int, runs: tuple[Summary, Summary], published: str
) -> Row:
    """Requests a second, of runs whose answers are all as long."""
    before, after = (output_rate(one) / answer_tokens for one in runs)
    return Row(group, what, True, False, before, after, "requests/s", published)


def _peers(tokens: int, gb_per_s: float, setup_s: float, *, readers: int) -> Store:
    return Store(tokens=tokens, gb_per_s=readers * gb_per_s, reader_gb_per_s=gb_per_s, latency_s=setup_s)


def _eight(pull: bool) -> FleetSpec:
    """gpt-oss-120b on eight H200, 88 GiB of host memory each, which peers may read over TCP."""
    group = Group(
        name="both",
        count=8,
        latency="gpt-oss-120b/1xh200",
        kv_tokens=1_220_000,
        kv_bytes_per_token=OSS_KV_BYTES,
        host=HostTier(tokens=2_277_000),
    )
    store = _peers(8 * 2_277_000, OSS_KV_BYTES / TCP_TOKEN_S / 1e9, TCP_PULL_S, readers=8)
    return scraped("w12 documents", group, store=store if pull else None)


def _pools(pull: bool) -> FleetSpec:
    """Qwen3-30B-A3B on six H200, two for prefill: KV in what 90 % of 141 GB leave beside 65 GB of weights and
    buffers. `pull`: 88 GiB of host memory each as well, which all may read.
    """
    prefill = Group(
        name="prefill",
        role="prefill",
        count=2,
        latency="qwen3-30b-a3b/1xh200",
        kv_tokens=630_000,
        kv_bytes_per_token=98_304,
        host=HostTier(tokens=961_000) if pull else None,
        link=LinkSpec(gb_per_s=40.0),
    )
    decode = msgspec.structs.replace(prefill, name="decode", role="decode", count=4)
    store = _peers(6 * 961_000, RDMA_GB_PER_S, RDMA_PULL_S, readers=6)
    return scraped("w12 coding", prefill, decode, store=store if pull else None)
