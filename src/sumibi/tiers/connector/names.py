"""What blocks are called below: the namespace of an engine's bytes, and content ids within it."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from sumibi.core.errors import ConfigError
from sumibi.tiers.blockfile import MAX_ID_BYTES

_ENDS_BYTES = 64 << 10
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def namespace_of(parts: Mapping[str, object]) -> str:
    """One text of everything that makes a block's bytes what they are beside its id, in a fixed order."""
    return json.dumps(parts, sort_keys=True, default=str)


def content_id(block_hash: bytes, version: bytes) -> bytes:
    """The id of a block that its engine calls `block_hash` (a cryptographic hash of the chain of tokens and
    of what separates caches), under a version of the weights: 32 bytes. Another version, another id.
    """
    return blake2b(block_hash, digest_size=MAX_ID_BYTES, key=version[:64]).digest()


def files_digest(where: Path, patterns: Sequence[str]) -> str:
    """Tells two sets of files apart by names, sizes and both ends of each; `where` is their directory, or one
    file. The ends, because a checkpoint has many gigabytes and two trainings of one model differ everywhere.
    Raises ConfigError where no file fits.
    """
    paths = [where] if where.is_file() else sorted({p for pattern in patterns for p in where.glob(pattern)})
    if not paths:
        raise ConfigError(f"{str(where)!r} has none of {', '.join(patterns)}: what lies there cannot be told")
    digest = blake2b(digest_size=16)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            digest.update(file.read(_ENDS_BYTES))
    return digest.hexdigest()
