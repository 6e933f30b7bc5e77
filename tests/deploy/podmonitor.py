"""The part of the Prometheus operator's PodMonitor that deploy/monitoring uses, by its API reference: its
definition is not among those beside the repository.
"""

TEXT = {"type": "string"}
SELECTOR = {
    "type": "object",
    "properties": {"matchLabels": {"type": "object", "additionalProperties": TEXT}},
}
ENDPOINT = {
    "type": "object",
    "properties": {
        "port": TEXT,
        "path": TEXT,
        "interval": {"type": "string", "pattern": "^(([0-9]+)ms|([0-9]+)s|([0-9]+)m|([0-9]+)h)$"},
        "scheme": {"type": "string", "enum": ["http", "https"]},
    },
}
SPEC = {
    "type": "object",
    "required": ["selector"],
    "properties": {
        "selector": SELECTOR,
        "podTargetLabels": {"type": "array", "items": TEXT},
        "podMetricsEndpoints": {"type": "array", "items": ENDPOINT},
    },
}
PODMONITOR = {"type": "object", "required": ["spec"], "properties": {"spec": SPEC}}
