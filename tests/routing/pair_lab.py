"""What tests of prefill and decode endpoints share: a fleet of both, and the events of a pair."""

from routing_lab import Lab, prompt

from sumibi.core.latency import LatencyModel, LinkModel
from sumibi.routing.events import Dispatched, Prefilled, Role

SPEED = LatencyModel(a_s=0.01, b_s=0.001, q_s=0.0, d0_s=0.02, d1_s=0.001, d2_s=0.0)
LINK = LinkModel(bytes_per_s=1e9, setup_s=0.002)
KV_BYTES = 100_000
FIELDS = {"latency": SPEED, "link": LINK, "kv_bytes_per_token": KV_BYTES}


def fleet(prefill=("p",), decode=("d",), both=(), **config):
    lab = Lab(**config)
    for role, names in ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.BOTH, both)):
        lab.up(*names, role=role, **FIELDS)
    return lab


def busy(lab, name="writer"):
    """Somebody decodes at each decode endpoint, so that a prefill there costs more than a transfer."""
    for view in lab.router.fleet_view():
        if view.role is not Role.PREFILL and not view.decoding:
            request = f"{name}-{view.endpoint}"
            while True:
                lab.ask(request, prompt(request, 20))
                if lab.attempts[request].endpoint == view.endpoint:
                    break
                lab.first(request)
                request += "+"
            lab.first(request)


def crowd(lab, endpoint="d", writers=10):
    """Many decode there."""
    for i in range(writers):
        request = f"writer-{i}"
        lab.ask(request, prompt(request, 20), max_tokens=1_000)
        assert lab.attempts[request].endpoint == endpoint
        lab.first(request)


def leave(lab, request):
    """Both halves of a pair leave; the first is told at once (`Lab.dispatched` takes the decode endpoint)."""
    attempt = lab.attempts[request]
    lab.tell(Dispatched, request=request, attempt=attempt.attempt, endpoint=attempt.prefill)


def begin(lab, request, tokens, **fields):
    """Arrive and be placed; returns (prefill endpoint, decode endpoint)."""
    lab.arrive(request, tokens, **fields)
    attempt = lab.attempts[request]
    if attempt.prefill is not None:
        leave(lab, request)
    else:
        lab.dispatched(request)
    return attempt.prefill, attempt.endpoint


def prefilled(lab, request, *, dt=0.0, **fields):
    number = lab.attempts[request].attempt
    return lab.tell(Prefilled, dt=dt, request=request, attempt=number, **fields)


def load(lab, name):
    view = lab.view(name)
    return view.inflight, view.prefilling, view.coming, view.decoding


def decision(lab):
    return lab.router.decisions(1)[0]


NOTHING = (0, 0, 0, 0)
