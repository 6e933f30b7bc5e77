"""`--record DIR`: what happened, in a form that can be replayed and read, and never any text.

`events.jsonl` has the router's settings and every event it was given, in its recordable form (routing keys
instead of token ids): `routing.recording` gets the same decisions from it. `decisions.jsonl` has each
decision with all its inputs, for `sumibi decisions rerun`; `outcomes.jsonl` what came of it. All three are
bounded as logs are (`jsonl`): of a recording longer than the limit only the newest part is left.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sumibi.core.errors import ConfigError
from sumibi.gateway.jsonl import JsonlLog
from sumibi.routing.config import RouterConfig
from sumibi.routing.decisions import Decision, Outcome
from sumibi.routing.events import Event
from sumibi.routing.recording import Started

_MAX_FILE_BYTES: Final = 256 * 1024 * 1024
_KEEP_FILES: Final = 8


class Recorder:
    """Takes what is to be recorded; its logs have to be run and flushed by their owner."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError if `directory` cannot be made or written to."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as cause:
            raise ConfigError(f"--record {directory}: {cause}") from cause
        self._events = _log(directory / "events.jsonl")
        self._decisions = _log(directory / "decisions.jsonl")
        self._outcomes = _log(directory / "outcomes.jsonl")

    def logs(self) -> Iterator[JsonlLog]:
        """The logs behind it."""
        yield from (self._events, self._decisions, self._outcomes)

    def started(self, config: RouterConfig) -> None:
        """A router was made with these settings; what follows is told to it."""
        self._events.append(Started(config))

    def event(self, event: Event) -> None:
        """An event in its recordable form."""
        self._events.append(event)

    def decision(self, decision: Decision) -> None:
        """A decision that was just made."""
        self._decisions.append(decision)

    def outcome(self, outcome: Outcome) -> None:
        """What became of an attempt."""
        self._outcomes.append(outcome)


def _log(path: Path) -> JsonlLog:
    return JsonlLog(path, max_file_bytes=_MAX_FILE_BYTES, keep_files=_KEEP_FILES)
