"""What engines count of KV that was lost on the way or in a tier: requests are answered all the same, only
later, so nobody hears of it unless somebody looks. The names are those of our engine's and our vLLM
connector's metrics.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sumibi.admin import Sample


@dataclass(frozen=True, slots=True)
class _Trouble:
    label: str
    """Tells its kinds apart."""
    found: str
    fix: str


_SEE_LOG = "see the engine's log"
_TROUBLES = {
    "sumibi:kv_tier_corrupt_total": _Trouble(
        "tier",
        "blocks read were not what was written (computed instead)",
        "does the medium fail, or does something else write there?",
    ),
    "sumibi:kv_tier_errors_total": _Trouble(
        "tier",
        "reads or writes failed (it rests after each)",
        f"is it full, read-only or out of reach? {_SEE_LOG}",
    ),
    "sumibi:kv_tier_dropped_total": _Trouble(
        "tier",
        "blocks found no room there (computed again when they are wanted)",
        "does disk or store keep up? More host_bytes give what waits more room (docs/kv-tiers.md)",
    ),
    "sumibi:kv_tier_late_total": _Trouble(
        "tier", "answers came too late to be waited for", "is the disk or the network overloaded?"
    ),
    "sumibi:kv_transfer_failures_total": _Trouble(
        "reason", "pulls from a prefill engine brought not all", _SEE_LOG
    ),
    "sumibi:kv_transfer_refusals_total": _Trouble("reason", "peers that came for blocks got none", _SEE_LOG),
    "sumibi:kv_transfer_corrupt_blocks_total": _Trouble(
        "",
        "blocks from a prefill engine had a wrong checksum",
        "do proxies or hardware on the way change bytes?",
    ),
}
_REFUSALS = "sumibi:kv_transfer_refusals_total"
"""Seen from the prefill engine; failures are the decode engine's view."""
_FIXES = {
    "secret": "give all engines of a pool the same secret_file (or SUMIBI_KV_TRANSFER_SECRET), or none",
    "namespace": "serve the same weights with the same name, dtype and block size on both sides",
}
"""Where the reason says what to do."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One counter that is not zero."""

    about: str
    found: str
    fix: str


def troubles(samples: Sequence[Sample]) -> list[Trouble]:
    """All of one engine's metrics page; several data-parallel ranks are added up."""
    counts: dict[tuple[str, str], float] = {}
    for sample in samples:
        trouble = _TROUBLES.get(sample.name)
        if trouble is not None and sample.value:
            kind = sample.labels.get(trouble.label, "") if trouble.label else ""
            counts[sample.name, kind] = counts.get((sample.name, kind), 0.0) + sample.value
    found = []
    for (name, kind), count in counts.items():
        trouble = _TROUBLES[name]
        about = "side channel" if name == _REFUSALS else "KV transfers" if "transfer" in name else "KV tier"
        about += f" ({kind})" if kind else ""
        found.append(Trouble(about, f"{count:g} {trouble.found}", _FIXES.get(kind, trouble.fix)))
    return found
