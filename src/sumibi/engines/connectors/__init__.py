"""How prefill and decode engines are told to hand KV over: one small declaration for each protocol.

A declaration says in which order the two halves of a pair leave, which fields each half's request gets, and
what has to come back from the prefill half. Nothing is sent here; whoever runs a pair reads this.
"""

from sumibi.engines.connectors.declare import Connector, Order, Slot, Values, fill
from sumibi.engines.connectors.known import CONNECTORS, NIXLV2, PAIRED, SGLANG, STREAM
from sumibi.engines.connectors.wire import (
    PrefillAnswer,
    decode_body,
    prefill_body,
    read_prefill_answer,
    set_fields,
    unpairable,
)

__all__ = [
    "CONNECTORS",
    "NIXLV2",
    "PAIRED",
    "SGLANG",
    "STREAM",
    "Connector",
    "Order",
    "PrefillAnswer",
    "Slot",
    "Values",
    "decode_body",
    "fill",
    "prefill_body",
    "read_prefill_answer",
    "set_fields",
    "unpairable",
]
