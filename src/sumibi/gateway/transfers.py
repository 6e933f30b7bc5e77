"""How KV gets from one endpoint to another: its connector, and where its side channel listens."""

import secrets
from dataclasses import dataclass

from sumibi.core.ids import new_id
from sumibi.engines.connectors import CONNECTORS, Connector, Values
from sumibi.engines.discovery import address_of
from sumibi.gateway.options import EngineOption


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


def transfer_of(option: EngineOption) -> Transfer | None:
    """The transfer of an engine, None if it hands no KV over."""
    if option.connector is None:
        return None
    connector = CONNECTORS[option.connector]
    return Transfer(connector, address_of(option.url)[0], option.kv_port or connector.port or 0)
