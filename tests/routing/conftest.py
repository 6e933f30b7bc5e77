"""Makes `routing_lab` importable: what the routing tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
