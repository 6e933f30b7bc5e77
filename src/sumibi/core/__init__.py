"""Words everyone uses: block keys, content ids, KV events, latency model, errors, ids.

Imports nothing else of sumibi. Everything here is plain data and pure functions.
"""
