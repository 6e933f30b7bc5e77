"""From an API key to a tenant id. Nothing is enforced here yet: an unknown key is the tenant `anonymous`.

The file (YAML or JSON) maps the SHA-256 of a key, in hex, to a tenant id, so that it holds no secret:

    5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8: team-a
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from sumibi.core.errors import ConfigError

ANONYMOUS: Final = "anonymous"
_MAX_REMEMBERED: Final = 10_000


class Tenants:
    """Looks API keys up; remembers digests, as the same few keys come again and again."""

    def __init__(self, tenant_of_digest: Mapping[str, str]) -> None:
        self._tenant_of_digest = dict(tenant_of_digest)
        self._remembered: dict[bytes, str] = {}

    @classmethod
    def load(cls, path: Path | None) -> "Tenants":
        """Read `--api-keys`; without a file everyone is anonymous. Raises ConfigError naming the entry."""
        if path is None:
            return cls({})
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as cause:
            raise ConfigError(f"--api-keys {path}: {cause}") from cause
        if not isinstance(content, dict):
            raise ConfigError(f"--api-keys {path}: want a mapping of SHA-256 (hex) to tenant id")
        entries = {str(digest).lower(): tenant for digest, tenant in content.items()}
        for digest, tenant in entries.items():
            if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
                raise ConfigError(f"--api-keys {path}: {digest!r} is not a SHA-256 in hex (64 digits)")
            if not isinstance(tenant, str) or not tenant:
                raise ConfigError(f"--api-keys {path}: the tenant of {digest[:8]}... is not a name")
        return cls(entries)

    @property
    def configured(self) -> bool:
        """True if API keys are the gateway's own: then they are not passed on to engines."""
        return bool(self._tenant_of_digest)

    def of(self, named: Mapping[bytes, bytes]) -> str:
        """The tenant by the headers of a request (by lower-case name): `Authorization: Bearer KEY`, or else
        `X-Api-Key: KEY`, which Anthropic's clients send.
        """
        authorization = named.get(b"authorization")
        if authorization is None and b"x-api-key" in named:
            authorization = b"bearer " + named[b"x-api-key"]
        if authorization is None or not self._tenant_of_digest:
            return ANONYMOUS
        tenant = self._remembered.get(authorization)
        if tenant is None:
            scheme, _, key = authorization.partition(b" ")
            digest = hashlib.sha256(key.strip()).hexdigest() if scheme.lower() == b"bearer" else ""
            tenant = self._tenant_of_digest.get(digest)
            if tenant is None:
                return ANONYMOUS  # not remembered: clients can make up as many as they like
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[authorization] = tenant
        return tenant
