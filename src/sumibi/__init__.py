"""sumibi: keep the KV cache warm, from a laptop to a Kubernetes fleet.

Nothing is imported here on purpose: `sumibi --help` must answer in under 0.3 s, and the gateway must
start without torch. Import the room you need (`sumibi.routing`, `sumibi.engine`, ...).
"""

__version__ = "0.1.0"
