"""A tier that fails is left alone for a while, so that its failures cost nobody's time."""

import logging
import time

_log = logging.getLogger(__name__)
_FIRST_S = 1.0
_LONGEST_S = 60.0


class Rest:
    """Failures in a row double the rest, from 1 s to 60 s. Said once when it begins and once when it ends.
    Any thread may ask; a lost update costs one try.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._for_s = 0.0
        self._until_s = 0.0

    @property
    def resting(self) -> bool:
        """Leave it alone now?"""
        return time.monotonic() < self._until_s

    def failed(self, why: object) -> None:
        """It failed once more. What fails while it rests began before, and says nothing new."""
        if self.resting:
            return
        if not self._for_s:
            _log.warning("kv tier %s fails (%s): going on without it, trying again later", self._name, why)
        self._for_s = min(_LONGEST_S, self._for_s * 2 or _FIRST_S)
        self._until_s = time.monotonic() + self._for_s

    def worked(self) -> None:
        """It works."""
        if self._for_s:
            _log.warning("kv tier %s works again", self._name)
            self._for_s = 0.0
            self._until_s = 0.0
