"""What the tiers count, on vLLM's own metrics page, under the names of our engine's."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from sumibi.tiers.words import TIER_COUNTS, TIER_GAUGES, TiersStats


class TierStatsDelta(KVConnectorStats):
    """`data` is {"<tier>.<name>": number}: counts since the last one, gauges as they are."""

    def reset(self) -> None:
        """See the base."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """See the base."""
        for key, value in other.data.items():
            is_gauge = key.split(".")[1] in TIER_GAUGES
            self.data[key] = value if is_gauge else self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: what is not 0."""
        return {key: value for key, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """See the base."""
        return not self.data


class StatsReader:
    """Turns the tiers' totals into what changed."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def since(self, stats: TiersStats) -> TierStatsDelta | None:
        """None where nothing changed."""
        now = {
            f"{t}.{name}": getattr(s, name)
            for t, s in stats.tiers.items()
            for name in (*TIER_GAUGES, *TIER_COUNTS)
        }
        if now == self._last:
            return None
        data = {
            key: v if key.split(".")[1] in TIER_GAUGES else v - self._last.get(key, 0)
            for key, v in now.items()
        }
        self._last = now
        return TierStatsDelta(data=data)


class TierMetrics(KVConnectorPromMetrics):
    """One series an engine and tier."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        names = [*self._labelnames, "tier"]
        self._metrics: dict[str, Any] = {
            name: self._gauge_cls(
                f"sumibi:kv_tier_{name}", f"KV tier: {name}", labelnames=names, multiprocess_mode="mostrecent"
            )
            for name in TIER_GAUGES
        }
        for name, text in TIER_COUNTS.items():
            self._metrics[name] = self._counter_cls(f"sumibi:kv_tier_{name}", text, labelnames=names)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See the base."""
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            tier, name = key.split(".")
            metric = self._metrics[name].labels(*labels, tier)
            if name in TIER_GAUGES:
                metric.set(value)
            elif value:
                metric.inc(value)
