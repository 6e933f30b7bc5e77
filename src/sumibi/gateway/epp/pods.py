"""Endpoints by Kubernetes: the ready pods of an InferencePool, or of a selector, at its target ports.

A pod counts while it is ready and not about to go; one that is neither would not be used by a gateway either,
whose members of a pool are the ready ones.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sumibi.core.errors import ConfigError
from sumibi.gateway.epp.endpoints import EventPorts, engine_at
from sumibi.gateway.epp.kubeapi import Api, Reflection
from sumibi.gateway.options import EngineOption

POOL_GROUP: Final = "inference.networking.k8s.io"
_MAX_PORTS: Final = 8

log = logging.getLogger(__name__)

Found = Callable[[list[EngineOption]], Awaitable[None]]


class Selection(NamedTuple):
    """Which pods, and where they serve."""

    labels: str
    """A label selector, as the API takes it."""
    ports: tuple[int, ...]


class PodDiscovery:
    """Watches the pods of a selection."""

    def __init__(
        self, api: Api, namespace: str, selection: Selection, ports: EventPorts, found: Found
    ) -> None:
        self._selection = selection
        self._ports = ports
        self._found = found
        self._engines: list[EngineOption] | None = None
        path = f"/api/v1/namespaces/{namespace}/pods"
        self._pods = Reflection(api, path, self._changed, labelSelector=selection.labels)

    async def run(self) -> None:
        """Until cancelled."""
        await self._pods.run()

    async def _changed(self, pods: Mapping[str, Any]) -> None:
        engines = [
            engine_at(pod["status"]["podIP"], port, pod["metadata"].get("labels") or {}, self._ports)
            for _, pod in sorted(pods.items())
            if serves(pod)
            for port in self._selection.ports
        ]
        if engines != self._engines:
            self._engines = engines
            await self._found(engines)


class PoolDiscovery:
    """Watches an InferencePool, and the pods that it selects."""

    def __init__(
        self, api: Api, namespace: str, name: str, group: str, ports: EventPorts, found: Found
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._name = name
        self._ports = ports
        self._found = found
        self._selection: Selection | None = None
        self._pods: asyncio.Task[None] | None = None
        path = f"/apis/{group}/v1/namespaces/{namespace}/inferencepools"
        self._pools = Reflection(api, path, self._changed, fieldSelector=f"metadata.name={name}")

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await self._pools.run()
        finally:
            await self._let_go()

    async def _changed(self, pools: Mapping[str, Any]) -> None:
        pool = pools.get(self._name)
        selection = None if pool is None else selected_by(pool)
        if selection == self._selection and (selection is None or self._pods is not None):
            if pool is None:
                log.warning("there is no InferencePool %s/%s (yet)", self._namespace, self._name)
            return
        await self._let_go()
        self._selection = selection
        if selection is None:
            log.warning("the InferencePool %s/%s is gone, or selects nothing", self._namespace, self._name)
            await self._found([])
            return
        log.info("the InferencePool selects %s, ports %s", selection.labels, selection.ports)
        pods = PodDiscovery(self._api, self._namespace, selection, self._ports, self._found)
        self._pods = asyncio.get_running_loop().create_task(pods.run())

    async def _let_go(self) -> None:
        pods, self._pods = self._pods, None
        if pods is not None:
            pods.cancel()
            await asyncio.gather(pods, return_exceptions=True)


def serves(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is ready, and stays."""
    status = pod.get("status") or {}
    conditions = status.get("conditions") or ()
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions)
    return ready and bool(status.get("podIP")) and "deletionTimestamp" not in pod.get("metadata", {})


def selected_by(pool: Mapping[str, Any]) -> Selection | None:
    """What an InferencePool (v1) selects; None: nothing."""
    spec = pool.get("spec") or {}
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports = tuple(one["number"] for one in spec.get("targetPorts") or ())
    if not labels or not ports:
        return None
    return Selection(",".join(f"{name}={value}" for name, value in sorted(labels.items())), ports)


def selection_of(labels: str, ports: Sequence[str]) -> Selection:
    """Of `--endpoint-selector` and `--endpoint-target-ports`. Raises ConfigError naming flag and word."""
    words = [word.strip() for text in ports for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdigit() or not 1 <= int(word) <= 65535:
            raise ConfigError(f"--endpoint-target-ports: {word!r}: want ports, 1 to 65535")
    if not 1 <= len(words) <= _MAX_PORTS:
        raise ConfigError(f"--endpoint-target-ports: name 1 to {_MAX_PORTS} ports of the selected pods")
    if not labels.strip():
        raise ConfigError("--endpoint-selector: want labels, for example app=vllm")
    return Selection(labels, tuple(int(word) for word in words))
