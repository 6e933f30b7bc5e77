"""The shape of a benchmark's result; it lives in the package because `sumibi bench` writes it too."""

from sumibi.bench.report import Figure, commit, figure, machine, page, statement, write

__all__ = ["Figure", "commit", "figure", "machine", "page", "statement", "write"]
