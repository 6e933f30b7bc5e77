"""What runs on this machine: the supervisor's view of processes beside the gateway's view of endpoints.

A gateway that was started by hand (`sumibi serve`) has no run file; it is asked at the admin door's
usual port, with the key that it keeps in the same state directory.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sumibi.admin import ADMIN_KEY_FILE, Admin, Fleet, Sample, metrics
from sumibi.core.errors import SumibiError
from sumibi.local.runfile import ChildState, RunRecord, is_running, read_run

ADMIN_PORT = 8080
"""Where `sumibi serve` opens its admin door by default."""
ADMIN_KEY_VARIABLE = "SUMIBI_ADMIN_KEY"
"""As `sumibi serve` reads it: in its container, or in its shell, the key is there for us as well."""
_ASKED_AT_ONCE = 16
_SOURCES = {"external_unspecified": "store"}
"""Tiers by the names that vLLM's metrics have for where cached tokens were, where they differ from ours."""


class TierStatus(msgspec.Struct, kw_only=True):
    """One tier below an engine's device, as the engine counts it; its data-parallel ranks added up."""

    tier: str
    """`host`, `disk` or `store`."""
    bytes: int
    """Held; of a store by all who write to it, as of its last listing."""
    limit_bytes: int
    blocks: int
    """Of a store those that this engine knows of."""
    prompt_share: float
    """Of all prompt tokens so far, those whose KV came from there."""


class Status(msgspec.Struct, kw_only=True):
    """`sumibi status --json` prints this as it is."""

    running: bool
    """A supervisor is there."""
    by_hand: str = ""
    """The admin door of a gateway that was not started by `sumibi up`, or empty."""
    ready: bool
    """Every process is ready and the gateway takes every endpoint for up."""
    problem: str
    """Why there is no more to say, or empty."""
    stack: RunRecord | None
    fleet: Fleet | None
    kv_tiers: dict[str, list[TierStatus]] = {}
    """Of the engines that have any, by URL: see `read_tiers`."""


def read_status(state_dir: Path, admin_port: int = ADMIN_PORT) -> Status:
    """Look at the run file and ask the gateway; what cannot be had is said in `problem`.

    `admin_port`: where to look for a gateway that was started by hand, if no stack runs.
    """
    if not is_running(state_dir):
        return _by_hand(state_dir, f"http://127.0.0.1:{admin_port}")
    record = read_run(state_dir)
    if record is None:
        problem = "a stack is being prepared (its model is being fetched)"
        return Status(running=True, ready=False, problem=problem, stack=None, fleet=None)
    fleet, problem = None, ""
    try:
        fleet = Admin.of(state_dir, record.admin_url).fleet()
    except SumibiError as cause:
        problem = str(cause)
    ready = (
        fleet is not None
        and all(child.state is ChildState.READY for child in record.children)
        and all(endpoint.up for endpoint in fleet.endpoints)
    )
    return Status(running=True, ready=ready, problem=problem, stack=record, fleet=fleet)


def read_tiers(fleet: Fleet) -> dict[str, list[TierStatus]]:
    """What every engine that is up has below its device, by its metrics page. An engine that has no tiers, or
    does not answer, is left out.
    """
    urls = list(dict.fromkeys(one.endpoint.partition("#")[0] for one in fleet.endpoints if one.up))
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
        pages = threads.map(_page, urls)
    return {url: tiers for url, page in zip(urls, pages, strict=True) if (tiers := tiers_on(page))}


def _page(url: str) -> list[Sample]:
    try:
        return metrics(f"{url}/metrics")
    except SumibiError:
        return []


def tiers_on(page: Sequence[Sample]) -> list[TierStatus]:
    """The tiers that an engine's metrics page tells of."""
    sums: dict[tuple[str, str], float] = {}
    for sample in page:
        if sample.name.startswith("sumibi:kv_tier_"):
            place = sample.labels.get("tier", "")
        else:
            source = sample.labels.get("source", "")
            place = _SOURCES.get(source, source)
        key = (sample.name, place)
        sums[key] = sums.get(key, 0.0) + sample.value
    prompts = sums.get(("vllm:prompt_tokens_total", ""), 0.0)

    def of(tier: str, name: str) -> int:
        return int(sums.get((f"sumibi:kv_tier_{name}", tier), 0))

    def share(tier: str) -> float:
        found = sums.get(("vllm:prompt_tokens_cached_by_source_total", tier), 0.0)
        return found / prompts if prompts else 0.0

    return [
        TierStatus(
            tier=tier,
            bytes=of(tier, "bytes"),
            limit_bytes=of(tier, "limit_bytes"),
            blocks=of(tier, "blocks"),
            prompt_share=share(tier),
        )
        for tier in ("host", "disk", "store")
        if of(tier, "limit_bytes")
    ]


def _by_hand(state_dir: Path, admin_url: str) -> Status:
    key = os.environ.get(ADMIN_KEY_VARIABLE)
    try:
        fleet = (Admin(admin_url, key) if key else Admin.of(state_dir, admin_url)).fleet()
    except SumibiError:  # usually nobody listens there
        where = ADMIN_KEY_VARIABLE if key else state_dir / ADMIN_KEY_FILE
        problem = f"no stack is running, and no gateway at {admin_url} takes the key in {where}"
        return Status(running=False, ready=False, problem=problem, stack=None, fleet=None)
    ready = all(endpoint.up for endpoint in fleet.endpoints)
    return Status(running=False, ready=ready, problem="", stack=None, fleet=fleet, by_hand=admin_url)
