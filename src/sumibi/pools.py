"""What is wrong with a fleet's prefill and decode pools: pairs that can never be made, or made only to fail.

Looks at the gateway's own view; each finding says what to change. Nothing here asks anybody.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sumibi.admin import Fleet
from sumibi.gateway.views import TransferView
from sumibi.routing.events import Role
from sumibi.routing.views import EndpointView

_NEEDS_PORT = ("stream", "sglang")
"""Connectors by which the decode engine is told a port before the prefill engine has answered."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `works`: requests are answered all the same, by whole runs."""

    about: str
    found: str
    fix: str
    works: bool = True


def findings(fleet: Fleet) -> list[Finding]:
    """Everything that is wrong with its pools; empty if no endpoint has a role, or all is well."""
    found: list[Finding] = []
    models = dict.fromkeys(endpoint.models[0] for endpoint in fleet.endpoints if endpoint.models)
    for model in models:
        endpoints = [e for e in fleet.endpoints if model in e.models]
        if any(e.role is not Role.BOTH for e in endpoints):
            found += _of_model(model, endpoints, fleet)
    return found


def _of_model(model: str, endpoints: list[EndpointView], fleet: Fleet) -> Iterator[Finding]:
    revisions = dict.fromkeys(e.revision for e in endpoints)
    complete = False
    for revision in revisions:
        pool = [e for e in endpoints if e.revision == revision]
        prefill = [e for e in pool if e.role is not Role.DECODE]
        decode = [e for e in pool if e.role is not Role.PREFILL]
        if prefill and decode and any(e.role is not Role.BOTH for e in pool):
            complete = True
            yield from _of_pool(prefill, decode, fleet)
    if not complete:
        yield _half(model, endpoints, list(revisions))


def _half(model: str, endpoints: list[EndpointView], revisions: list[str]) -> Finding:
    """No pair can be made."""
    roles = {e.role for e in endpoints}
    if len(revisions) > 1 and {Role.PREFILL, Role.DECODE} & roles and roles != {Role.PREFILL}:
        by = "; ".join(f"{e.endpoint}: {e.role} {e.revision or 'no revision'}" for e in endpoints)
        fix = "give engines that belong together the same revision=... (KV goes only within one)"
        return Finding(f"pools of {model}", f"no revision has both sides: {by}", fix)
    if roles == {Role.PREFILL}:
        fix = "add an engine with role=decode, or give one of these role=both"
        return Finding(f"pools of {model}", "prefill engines only: nobody generates", fix, works=False)
    fix = "add an engine with role=prefill, or leave the role out"
    return Finding(f"pools of {model}", "decode engines only: nobody computes prompts for them", fix)


def _of_pool(prefill: list[EndpointView], decode: list[EndpointView], fleet: Fleet) -> Iterator[Finding]:
    """Those of one revision."""
    pool = list({e.endpoint: e for e in (*prefill, *decode)}.values())
    views = {e.endpoint: fleet.wire[e.endpoint].transfer for e in pool if e.endpoint in fleet.wire}
    named = {view.connector for view in views.values() if view.connector}
    for endpoint, view in views.items():
        if not view.connector:
            fix = "add connector=... to its --engine, or start the engine with --kv-transfer-config"
            yield Finding(f"pairs at {endpoint}", "nobody says how it hands KV over", fix)
    if len(named) > 1:
        by = "; ".join(f"{endpoint}: {view.connector}" for endpoint, view in views.items())
        fix = "give all engines of one revision the same connector=..."
        yield Finding("connectors", f"engines of one revision have different ones: {by}", fix)
    yield from _sides(prefill, decode, views)
    yield from _secrets(views)
    spaces = {view.namespace for view in views.values() if view.namespace}
    if len(spaces) > 1:
        fix = "serve the same weights with the same name, dtype and block size, or say different revisions"
        by = "; ".join(f"{endpoint}: {view.namespace[:8]}" for endpoint, view in views.items())
        yield Finding("KV of pairs", f"their blocks differ, so all of it is refused: {by}", fix)


def _secrets(views: dict[str, TransferView]) -> Iterator[Finding]:
    """Either all have a secret or none (whether it is the same one, nobody tells)."""
    told = {endpoint: view.secured for endpoint, view in views.items() if view.secured is not None}
    if len(set(told.values())) > 1:
        by = "; ".join(f"{endpoint}: {'a secret' if has else 'none'}" for endpoint, has in told.items())
        fix = "give all of them the same secret_file (or SUMIBI_KV_TRANSFER_SECRET), or none"
        yield Finding("side channels", f"some have a secret and refuse the others: {by}", fix)


def _sides(
    prefill: list[EndpointView], decode: list[EndpointView], views: dict[str, TransferView]
) -> Iterator[Finding]:
    """Each engine does what its side of a pair needs."""
    for e in prefill:
        view = views.get(e.endpoint)
        if view is None:
            continue
        about = f"prefill at {e.endpoint}"
        if view.told_role == "kv_consumer" and e.role is Role.PREFILL:
            fix = "start it with kv_role kv_producer or kv_both"
            yield Finding(about, "the engine keeps nothing for others (kv_consumer)", fix)
        elif view.told_port and view.kv_port != view.told_port and view.connector in _NEEDS_PORT:
            fix = f"leave kv_port out, or set it to {view.told_port}"
            yield Finding(about, f"kv_port is {view.kv_port}, the engine listens at {view.told_port}", fix)
        elif view.port_from == "usual" and view.connector in _NEEDS_PORT:
            fix = "add kv_port=... to its --engine"
            yield Finding(about, f"nobody says its side channel's port; {view.kv_port} is a guess", fix)
    for e in decode:
        view = views.get(e.endpoint)
        if view is not None and view.told_role == "kv_producer" and e.role is Role.DECODE:
            fix = "start it with kv_role kv_consumer or kv_both"
            yield Finding(f"decode at {e.endpoint}", "the engine fetches nothing (kv_producer)", fix)
