"""Workloads, trace readers, replays and reports: what plays the simulator and shows what came of it."""
