"""A secret that engines share, and how each proves to the other that it knows it without saying it.

Both sides bring a random number. Each answers with a MAC (HMAC-SHA-256 under the secret) over its side's
name, both numbers and the greeting: so nothing that was listened to can be said again, and no answer can be
sent back to its author. What follows is not encrypted, nor are single frames signed: who can change packets
on the way can still do harm. It keeps out those who can only reach the port.
"""

import hmac
import os
import secrets
import stat
from enum import Enum
from pathlib import Path

import msgspec

from sumibi.core.errors import ConfigError
from sumibi.engine.transfer.frames import Hello

VARIABLE = "SUMIBI_KV_TRANSFER_SECRET"
"""Where the secret is looked for if no file is named."""
NONCE_BYTES = 16
_LEAST_BYTES = 16

_encode = msgspec.msgpack.Encoder().encode


class SideName(Enum):
    """Who proves."""

    PREFILL = b"prefill"
    DECODE = b"decode"


def nonce() -> bytes:
    """A number that is used once."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(secret: bytes, side: SideName, hello: Hello, number: bytes) -> bytes:
    """What only who knows `secret` can say: `hello` is the decode side's greeting, with its own number in it,
    `number` the prefill side's.
    """
    parts = (b"sumibi side channel", side.value, number, _encode(hello))
    return hmac.digest(secret, _encode(parts), "sha256")


def proves(said: bytes, secret: bytes, side: SideName, hello: Hello, number: bytes) -> bool:
    """Whether `said` is that; takes as long either way."""
    return hmac.compare_digest(said, proof(secret, side, hello, number))


def read_secret(file: str | None) -> tuple[bytes | None, str]:
    """The secret of the file, or of the environment where none is named, and what is to be said of it
    (empty: nothing); None: there is none. Raises ConfigError.
    """
    where = f"--kv-transfer-config: kv_connector_extra_config.secret_file {file}"
    note = ""
    if file is not None:
        path = Path(file).expanduser()
        try:
            text = path.read_bytes()
            mode = path.stat().st_mode
        except OSError as cause:
            raise ConfigError(f"{where}: cannot be read ({cause.strerror})") from cause
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            note = f"{path} can be read by others on this machine: chmod 600 it"
    else:
        where = f"the environment variable {VARIABLE}"
        given = os.environ.get(VARIABLE)
        if given is None:
            return None, ""
        text = given.encode("utf-8", "surrogateescape")
    secret = text.strip()
    if len(secret) < _LEAST_BYTES:
        raise ConfigError(
            f"{where} holds {len(secret)} bytes; a secret has {_LEAST_BYTES} or more, for example those of"
            " `openssl rand -hex 32`"
        )
    return secret, note
