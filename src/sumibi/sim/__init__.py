"""The simulator: discrete events around the same `routing` object that serves live traffic."""

from sumibi.sim.simulate import simulate

__all__ = ["simulate"]
