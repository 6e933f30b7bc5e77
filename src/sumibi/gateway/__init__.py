"""Bytes in, bytes out: the HTTP data plane around the router, and the admin door.

One asyncio process. It reads requests, turns them into routing events, carries out what the router says
and passes answers through. It decides nothing about placement (`routing` does) and knows nothing of how
an engine computes; what it knows of engines it learns through `sumibi.engines`.
"""
