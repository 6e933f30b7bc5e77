"""Kubernetes: objects checked without a cluster, as an API server would check them."""
