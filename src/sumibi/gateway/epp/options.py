"""Everything `sumibi epp` can be told beside what it has in common with `sumibi serve`; import-light."""

import ipaddress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sumibi.core.errors import ConfigError
from sumibi.gateway.epp.endpoints import EventPorts
from sumibi.gateway.epp.pods import POOL_GROUP, Selection
from sumibi.gateway.options import GatewayOptions

GRPC_PORT: Final = 9002
HEALTH_PORT: Final = 9003
METRICS_PORT: Final = 9090
FALLBACKS: Final = 2
"""As many as Envoy usually retries."""


class ResponsePhase(StrEnum):
    """Whether the answers of engines are looked at."""

    AUTO = "auto"
    """If Envoy shows them."""
    OFF = "off"
    """Never: less work, and the ends of requests are estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EppOptions:
    """The endpoint picker's configuration."""

    gateway: GatewayOptions
    """What it has in common with the gateway: engines, prompts, policy, limits, `host` for all ports."""
    grpc_port: int = GRPC_PORT
    health_port: int = HEALTH_PORT
    metrics_port: int = METRICS_PORT
    secure: bool = True
    """TLS on the first of these ports."""
    cert_path: Path | None = None
    """Directory with tls.crt and tls.key; None: a certificate is made."""
    response_phase: ResponsePhase = ResponsePhase.AUTO
    fallbacks: int = FALLBACKS
    """Addresses named to Envoy beside the first."""
    subset_filter: bool = True
    endpoints_file: Path | None = None
    """In place of engines, like the next two."""
    pool_name: str = ""
    """Of an InferencePool."""
    selection: Selection | None = None
    """Pods."""
    namespace: str = ""
    """Of pool or pods; empty: that of the pod that this runs in."""
    pool_group: str = POOL_GROUP
    event_ports: EventPorts = field(default_factory=EventPorts)
    """Of engines that are found, not named."""

    @property
    def discovers(self) -> bool:
        """Endpoints are found; else they are named once for all."""
        return self.endpoints_file is not None or bool(self.pool_name) or self.selection is not None


def check_source(options: EppOptions) -> None:
    """Endpoints come from one source, and have addresses, for Envoy goes by those. Raises ConfigError."""
    given = {
        "--engine": bool(options.gateway.engines),
        "--endpoints-file": options.endpoints_file is not None,
        "--pool-name": bool(options.pool_name),
        "--endpoint-selector": options.selection is not None,
    }
    named = [flag for flag, is_given in given.items() if is_given]
    if len(named) != 1:
        what = f"{' and '.join(named)} are given" if named else "none is given"
        raise ConfigError(f"where endpoints come from: want one of {', '.join(given)}; {what}")
    for engine in options.gateway.engines:
        try:
            ipaddress.ip_address(urlsplit(engine.url).hostname or "")
        except ValueError as cause:
            raise ConfigError(
                f"--engine {engine.url}: want an IP address, for Envoy is told where to go by address"
            ) from cause


def response_phase_of(word: str) -> ResponsePhase:
    """Of a `--response-phase` word. Raises ConfigError."""
    try:
        return ResponsePhase(word)
    except ValueError as cause:
        raise ConfigError(f"--response-phase is {word!r}: want {' or '.join(ResponsePhase)}") from cause
