"""Prefill and decode apart: KV blocks travel from the engine that computed them to the one that goes on.

The prefill side keeps a finished prompt's blocks under a lease and listens on a side channel; the decode side
pulls what its own cache lacks, block by block, over TCP or through shared memory. Blocks go by their content
ids within one namespace, each with a checksum.
"""
