"""The connectors that are known, by the name a user gives."""

from typing import Annotated

import msgspec
from msgspec import Meta

from sumibi.engines.connectors.declare import Connector, Order, Slot

_Name = Annotated[str, Meta(min_length=1)]
_Port = Annotated[int, Meta(ge=1, le=65535)]


class NixlReturned(msgspec.Struct):
    """What a vLLM prefill engine has to say for a decode engine to fetch from it (NixlConnector, 0.32)."""

    do_remote_prefill: bool
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: _Name
    remote_port: _Port
    remote_block_ids: list[list[int] | int]
    """One list of block ids a KV group; older versions give the ids of the only group by themselves."""
    remote_prefill_cached_tokens: Annotated[int, Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for what is of the right type and means nothing."""
        if not self.do_remote_prefill:
            raise ValueError("do_remote_prefill is false: there is nothing to fetch")
        if not any(group != [] for group in self.remote_block_ids):
            raise ValueError("remote_block_ids is empty: there is nothing to fetch")


_VLLMS = frozenset(("chat", "completions", "responses", "messages", "generate"))
"""The dialects that vLLM and the embedded engine speak: all take the fields of transfers."""

NIXLV2 = Connector(
    name="nixlv2",
    order=Order.SERIAL,
    apis=_VLLMS,
    one_token=True,
    prefill={
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    },
    takes="kv_transfer_params",
    returned=NixlReturned,
    decode={"kv_transfer_params": Slot.RETURNED},
)
"""vLLM's NixlConnector, pull flavour, and the embedded engine."""

_ROOM = {"bootstrap_host": Slot.HOST, "bootstrap_port": Slot.PORT, "bootstrap_room": Slot.ROOM}
SGLANG = Connector(
    name="sglang",
    order=Order.CONCURRENT,
    apis=frozenset(("chat", "completions", "sglang")),
    one_token=False,
    prefill=_ROOM,
    decode=_ROOM,
    port=8998,
)
"""SGLang: both engines get the same body and meet in a room of the prefill engine's bootstrap server."""

STREAM = Connector(
    name="stream",
    order=Order.CONCURRENT,
    apis=_VLLMS,
    one_token=True,
    prefill={
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": Slot.TRANSFER_ID,
        }
    },
    decode={
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": Slot.TRANSFER_ID,
            "remote_host": Slot.HOST,
            "remote_port": Slot.PORT,
        }
    },
    port=5600,
)
"""The embedded engine's own: blocks are fetched while the prompt is still being computed."""

CONNECTORS = {connector.name: connector for connector in (NIXLV2, SGLANG, STREAM)}
PAIRED = frozenset[str]().union(*(connector.apis for connector in CONNECTORS.values()))
"""Dialects in which at least one connector's engines can run pairs."""
