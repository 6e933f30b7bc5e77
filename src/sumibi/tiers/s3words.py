"""What an S3 server or its client says when something fails, in few words and with what mends it.

The client's texts are long, hold whole URLs and answers, and name no variable that a person could set. Codes
are those of S3's error responses; other servers use the same ones.
"""

import os
import re

from sumibi.tiers.words import Refused

KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
KEYS_FIX = f"set {KEYS} to a pair that may read and write there"
_SOURCES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_SKIP_SIGNATURE",
)
"""Where credentials come from, beside the machine's own role, which the client asks the network for."""

_REFUSALS = {
    "NoSuchBucket": ("there is no such bucket", "make it, or name one that is there"),
    "InvalidBucketName": ("the server says that this is no bucket's name", "name a bucket that is there"),
    "SignatureDoesNotMatch": ("AWS_SECRET_ACCESS_KEY is not the one of AWS_ACCESS_KEY_ID", KEYS_FIX),
    "InvalidAccessKeyId": ("the server does not know this AWS_ACCESS_KEY_ID", KEYS_FIX),
    "AccessDenied": ("these credentials may not", KEYS_FIX),
}
"""Code -> (what is wrong, what mends it): what waiting does not mend."""
_STATUS = re.compile(r"status code: (\d{3}[A-Za-z ]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_METADATA = re.compile(r"169\.254\.169\.254|/latest/(api/token|meta-data)")
_WHERE = re.compile(r"Error performing (\w+) (\w+://[^/\s]+)\S*")


def silence(url: str) -> OSError:
    """A store at `url` gave no answer in time. Without credentials the client asks the network for some, and
    waits: that is no store that is down.
    """
    if not url.startswith("s3://") or _has_credentials():
        return TimeoutError("no answer in time")
    return _no_credentials("nobody answered in time who gives some to this machine")


def _has_credentials() -> bool:
    return any(os.environ.get(name) for name in _SOURCES)


def _no_credentials(why: str) -> Refused:
    return Refused(f"no credentials were found: neither of {KEYS} is set, and {why}", f"set {KEYS}")


def failure(doing: str, cause: Exception, fix: str = "") -> OSError:
    """`cause`, of the client, as a short error: a `Refused` where waiting does not mend it, and always with
    a `fix`. `doing` is what failed, like "put".
    """
    text = " ".join(str(cause).split()).partition(" Debug source")[0]
    if _METADATA.search(text) and not _has_credentials():
        return _no_credentials("this machine has no role that gives some")
    code = _CODE.search(text)
    if code and code[1] in _REFUSALS:
        problem, fix = _REFUSALS[code[1]]
        return Refused(f"{problem} ({code[1]})", fix)
    status = _STATUS.search(text)
    said = f" ({code[1]})" if code else ""
    if status:
        problem = f"{doing}: the server answered {status[1].strip()}{said}"
        return Refused(problem, fix) if fix else OSError(problem)
    where = _WHERE.search(text)
    if where:
        return OSError(f"{doing}: no answer from {where[2]} ({text.rpartition(' - ')[2][:100]})")
    return OSError(f"{doing}: {text[:200]}")
