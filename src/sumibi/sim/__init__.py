"""The simulator: discrete events around the same `routing` object that serves live traffic."""
