"""How we talk to an engine that someone else wrote: discovery, load signals, KV event streams.

Yields typed records about one engine; it knows nothing of routing, of requests or of the gateway, which
turns the records into routing events.
"""
