"""What the gateway shows of itself on its admin door, beside the router's own views."""

import msgspec


class TransferView(msgspec.Struct, frozen=True):
    """How KV gets to an endpoint and from there, as the gateway will have it and as the engine told."""

    connector: str = ""
    """Empty: neither the user nor the engine named one."""
    kv_port: int = 0
    port_from: str = "usual"
    """Where the port is from: `said` by the user, `told` by the engine, or `usual` for the connector."""
    told_role: str = ""
    """Empty, like the next, and 0: the engine tells nothing."""
    told_port: int = 0
    namespace: str = ""
    secured: bool | None = None
