"""The cache lives in core: the router imitates engines with it, the simulator is one."""

from sumibi.core.prefixcache import PrefixCache, Segment

__all__ = ["PrefixCache", "Segment"]
