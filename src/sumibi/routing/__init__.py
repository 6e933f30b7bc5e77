"""The brain, sans-IO: fleet, index, ledger, cost, policies, learning, explanation.

One state machine (`sumibi.routing.router.Router`): typed events with a time go in, typed instructions
come out. No sockets, no clock, no asyncio, no randomness of its own. The HTTP gateway, the endpoint
picker and the simulator are shells around the same object.
"""
