"""Which session a request belongs to, if its headers say so.

The names are those that agents and routers already use; the first one that is there counts. What the client
wrote is not kept: the router and its recordings get a hash, together with the tenant, so that one tenant's
sessions are never another's.
"""

from collections.abc import Mapping

from xxhash import xxh3_128_hexdigest

SESSION_HEADERS = (
    b"x-session-id",  # llm-d's session affinity
    b"x-claude-code-session-id",  # Claude Code
    b"x-session-affinity",  # OpenCode
    b"session-id",  # Codex
    b"session_id",  # Codex, older
)
"""Lower-case names, the first hit wins. Source: llm-d-router, agent identity and session affinity."""


def session_of(named: Mapping[bytes, bytes], tenant: str) -> str:
    """An id of the session named in the headers (by lower-case name): 32 hex digits; empty if none is."""
    for name in SESSION_HEADERS:
        value = named.get(name)
        if value:
            return xxh3_128_hexdigest(tenant.encode() + b"\0" + value)
    return ""
