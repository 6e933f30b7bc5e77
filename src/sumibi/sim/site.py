"""What the world keeps of a request on its way, and of an endpoint."""

from math import inf

from sumibi.core.latency import LatencyModel
from sumibi.sim.job import Job
from sumibi.sim.replica import Replica
from sumibi.sim.results import NAN
from sumibi.sim.sessions import Playing
from sumibi.sim.stream import Stream


class Call:
    """One request on its way."""

    __slots__ = (
        "arrival_s",
        "attempt",
        "dispatch_s",
        "first_s",
        "index",
        "job",
        "keys",
        "leg",
        "name",
        "over",
        "playing",
        "predicted_tokens",
        "prompt_tokens",
        "site",
        "source",
        "unavoidable_tokens",
    )

    def __init__(self, name: str, playing: Playing, index: int, keys: list[int], arrival_s: float) -> None:
        self.name = name
        self.playing = playing
        self.index = index
        self.keys = keys
        self.arrival_s = arrival_s
        self.dispatch_s = self.first_s = NAN
        self.attempt = 0
        self.prompt_tokens = playing.session.turns[index].prompt_tokens
        self.site: Site | None = None
        self.job: Job | None = None
        self.source: Site | None = None
        """Of a pair: where the prompt is computed, while `site` is where it decodes."""
        self.leg: Job | None = None
        """There; None as well if that came to nothing."""
        self.predicted_tokens = 0
        self.unavoidable_tokens = 0
        self.over = False

    @property
    def computed(self) -> Job | None:
        """The job that computes, or computed, its prompt."""
        return self.leg or self.job

    def adapter_at(self, site: "Site") -> str:
        """The adapter that it needs there; empty: none."""
        model = self.playing.session.model
        return model if model in site.replica.group.adapters else ""


class Site:
    """An endpoint: a replica with its place in the fleet, its KV event stream, its metrics page."""

    __slots__ = (
        "alive",
        "armed_s",
        "latency",
        "number",
        "peers",
        "replica",
        "scrape_interval_s",
        "scrape_next_s",
        "scraped",
        "start_s",
        "stream",
    )

    def __init__(
        self,
        number: int,
        replica: Replica,
        stream: Stream,
        latency: LatencyModel,
        scrape_interval_s: float,
    ) -> None:
        self.number = number
        self.replica = replica
        self.stream = stream
        self.peers: list[Site] = [self]
        """Ranks of the same engine, this one included."""
        self.latency = latency
        """As the router is told."""
        self.alive = True
        self.start_s = 0.0
        """Of its process."""
        self.armed_s = inf
        """When its replica is looked at next."""
        self.scrape_interval_s = scrape_interval_s
        self.scrape_next_s = 0.0
        self.scraped = -1
        """`Replica.changed` when its page was last told."""
