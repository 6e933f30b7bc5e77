"""Everything `sumibi epp` can be told beside what it has in common with `sumibi serve`; import-light."""

import ipaddress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sumibi.core.errors import ConfigError
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


def check_addresses(options: GatewayOptions) -> None:
    """Envoy goes by addresses. Raises ConfigError for an engine that is named otherwise."""
    for engine in options.engines:
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
