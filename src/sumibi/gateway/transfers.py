"""How KV gets from one endpoint to another: its connector, and where its side channel listens."""

import secrets
from dataclasses import dataclass

from sumibi.core.ids import new_id
from sumibi.engines.connectors import CONNECTORS, Connector, Values
from sumibi.engines.discovery import TransferInfo, address_of
from sumibi.gateway.options import EngineOption
from sumibi.gateway.views import TransferView
from sumibi.routing.events import Role


@dataclass(frozen=True, slots=True)
class Transfer:
    """One endpoint's side of a connector."""

    connector: Connector
    host: str
    port: int
    """0 if the connector has no use for one."""

    def values(self) -> Values:
        """What fills the templates of one more pair that is prefilled there."""
        # A room says by its remainder which rank of an engine takes it: any 63 bits do.
        room = secrets.randbits(63)
        return Values(host=self.host, port=self.port, room=room, transfer_id=new_id("xfer"))


_CONNECTOR_OF = {"NixlConnector": "nixlv2", "NixlPullConnector": "nixlv2", "stream": "stream"}
_ROLE_OF = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}
"""What an engine says of itself, in the words of `--engine`."""


def role_of(option: EngineOption, told: TransferInfo | None) -> Role:
    """What an engine is for: the user's word before its own."""
    if option.role is not None or told is None:
        return option.role or Role.BOTH
    return _ROLE_OF.get(told.kv_role, Role.BOTH)


def transfer_of(option: EngineOption, told: TransferInfo | None = None) -> Transfer | None:
    """The transfer of an engine, by the user's words before its own; None if neither says that it hands KV
    over.
    """
    name = option.connector or (_CONNECTOR_OF.get(told.kv_connector) if told is not None else None)
    if name is None:
        return None
    connector, host, port = CONNECTORS[name], address_of(option.url)[0], option.kv_port
    if port is None and told is not None and told.remote_port:
        host, port = told.remote_host or host, told.remote_port
    return Transfer(connector, host, port or connector.port or 0)


def view_of(option: EngineOption, told: TransferInfo | None) -> TransferView:
    """What is known of an engine's transfers, for who looks for mistakes."""
    transfer = transfer_of(option, told)
    return TransferView(
        connector=transfer.connector.name if transfer is not None else "",
        kv_port=transfer.port if transfer is not None else 0,
        port_from="said" if option.kv_port else "told" if told is not None and told.remote_port else "usual",
        told_role=told.kv_role if told is not None else "",
        told_port=told.remote_port if told is not None else 0,
        namespace=told.namespace if told is not None else "",
        secured=told.secured if told is not None else None,
    )
