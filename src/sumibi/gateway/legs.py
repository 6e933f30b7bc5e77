"""What a sidecar says of the prefill half of a pair, in a header of its answer (`PREFILLED_HEADER`).

ok; prompt_tokens=812; cached_tokens=640
failed; reason=refused
"""

from sumibi.routing.events import FinishReason, Prefilled

_MAX_BYTES = 200


def written(event: Prefilled) -> bytes:
    """The header's value."""
    if event.failed is not None:
        return f"failed; reason={event.failed.value}".encode()
    counts = {"prompt_tokens": event.prompt_tokens, "cached_tokens": event.cached_tokens}
    return "; ".join(["ok", *(f"{name}={n}" for name, n in counts.items() if n is not None)]).encode()


def read(value: bytes, *, t: float, request: str, attempt: int) -> Prefilled | None:
    """The event that it tells of; None: it says nothing that is known."""
    word, *rest = value[:_MAX_BYTES].decode("latin-1").split("; ")
    told = dict(part.partition("=")[::2] for part in rest)
    if word == "failed":
        try:
            reason = FinishReason(told.get("reason", ""))
        except ValueError:
            return None
        return Prefilled(t=t, request=request, attempt=attempt, failed=reason)
    if word != "ok":
        return None
    return Prefilled(
        t=t,
        request=request,
        attempt=attempt,
        prompt_tokens=_count(told.get("prompt_tokens", "")),
        cached_tokens=_count(told.get("cached_tokens", "")),
    )


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 10 else None
