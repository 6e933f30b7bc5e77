"""From a stack to the child processes that run it: argv, environment, cores, where to ask for health.

Pure: the same stack, directories and cores give the same plan. Replicas and gateway are started through
`sumibi engine` and `sumibi serve`, as a user would start them by hand, so whatever a log shows can be
repeated in a shell.

KV events travel over Unix sockets in the state directory: they hold prompts' token ids, so no other
user and no other machine may listen, and there is no port to collide.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sumibi.core.errors import EnvironmentProblem
from sumibi.stack import Band, Role, Stack

SOCKET_PATH_LIMIT_BYTES = 107
"""sizeof(sockaddr_un.sun_path) - 1 on Linux."""
_CUT_OFF_S = 5.0
"""Of the gateway, after its drain time: for error events and answers to leave, and logs to be written."""
_ENGINE_DRAIN_S = 5.0
"""Of an engine, for requests that came past the gateway."""
_ENGINE_CLOSE_S = 15.0
"""Of an engine, after that: for KV that waits to be written to a disk or a store."""
_CONNECTORS = {"stream": "stream", "nixlv2": "NixlConnector"}
_KV_ROLES: dict[Role, str] = {"both": "kv_both", "prefill": "kv_producer", "decode": "kv_consumer"}
"""Roles, as vLLM's `kv_role` has them."""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One process to keep alive."""

    name: str
    argv: list[str]
    health_url: str
    """GET it: 200 means ready."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the supervisor's environment."""
    cores: tuple[int, ...] = ()
    """CPU cores it may run on; empty: any."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Every child, engines first; `notes` is what the user should know about the layout."""

    children: list[ChildPlan]
    url: str
    admin_url: str
    model: str
    notes: list[str]
    drain_timeout_s: float = 0.0
    """What running requests get to finish after a stop was asked for."""

    @property
    def stop_within_s(self) -> float:
        """All are gone so long after a stop was asked for: the gateway first, then the engines together."""
        *engines, door = self.children
        return door.grace_s + max((engine.grace_s for engine in engines), default=0.0)


def plan_stack(stack: Stack, *, model_dir: str, state_dir: Path, cores: list[int]) -> StackPlan:
    """Lay `stack` out on the given `cores`. `model_dir` is what `sumibi engine --model` takes: an
    absolute directory, whose name is the model's, or `tiny`. `state_dir` ends in `sumibi`, as the gateway
    expects of $XDG_STATE_HOME.

    Raises EnvironmentProblem if the state directory's path is too long for a Unix socket.
    """
    model = Path(model_dir).name
    shares, notes = share_cores(len(stack.engine_ports), stack.engines.cores_each, cores)
    engines = [
        _engine(stack, index, port, shares[index], model, model_dir, state_dir)
        for index, port in enumerate(stack.engine_ports)
    ]
    gateway = stack.gateway
    door = ChildPlan(
        name="gateway",
        argv=[
            *(sys.executable, "-m", "sumibi", "serve"),
            *("--host", gateway.host, "--port", str(gateway.port)),
            *("--admin-port", str(gateway.admin_port)),
            *("--policy", gateway.policy),
            *("--drain-timeout", str(gateway.drain_timeout_s)),
            *(part for word in gateway.objectives.items() for part in ("--objective", "{}={}".format(*word))),
            *("--hold-above", "none" if gateway.hold_above_s is None else str(gateway.hold_above_s)),
            *("--band", _band("other", gateway.other_bands)),
            *(part for p in gateway.bands for part in ("--band", _band(str(p), gateway.band(p)))),
            *(part for index in range(len(engines)) for part in ("--engine", _told(stack, index))),
            *(("--tokenizer", model_dir) if Path(model_dir).is_dir() else ()),
        ],
        # Admin key and usage log lie in the same directory as everything else of this stack.
        env={"XDG_STATE_HOME": str(state_dir.parent)},
        health_url=f"http://{reachable(gateway.host)}:{gateway.port}/health",
        grace_s=gateway.drain_timeout_s + _CUT_OFF_S,
    )
    return StackPlan(
        children=[*engines, door],
        url=f"http://{reachable(gateway.host)}:{gateway.port}",
        admin_url=f"http://127.0.0.1:{gateway.admin_port}",
        model=model,
        notes=notes,
        drain_timeout_s=gateway.drain_timeout_s,
    )


def share_cores(replicas: int, each: int, cores: list[int]) -> tuple[list[tuple[int, ...]], list[str]]:
    """Cores of each replica: its own while there are enough, else shared in turn, and a note says so."""
    wanted = replicas * each
    if wanted <= len(cores):
        return [tuple(cores[i * each : (i + 1) * each]) for i in range(replicas)], []
    each = min(each, len(cores))
    shares = [tuple(cores[(i * each + k) % len(cores)] for k in range(each)) for i in range(replicas)]
    note = f"{replicas} replicas want {wanted} cores and this process may use {len(cores)}: they share"
    return shares, [note]


def reachable(host: str) -> str:
    """The address at which a client on this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)


def _engine(
    stack: Stack, index: int, port: int, cores: tuple[int, ...], model: str, model_dir: str, state_dir: Path
) -> ChildPlan:
    engines = stack.engines
    tiers = engines.tiers.config(index)
    transfer = _transfer(stack, index)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": _socket(state_dir, f"kv-{index}"),
        "replay_endpoint": _socket(state_dir, f"replay-{index}"),
        "topic": f"kv@127.0.0.1:{port}@{model}",
    }
    return ChildPlan(
        name=f"engine-{index}",
        argv=[
            *(sys.executable, "-m", "sumibi", "engine"),
            *("--model", model_dir, "--served-model-name", model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", engines.dtype),
            *("--shutdown-grace", str(_ENGINE_DRAIN_S)),
            *("--block-size", str(engines.block_tokens), "--kv-blocks", str(engines.kv_blocks)),
            *(() if engines.max_model_len is None else ("--max-model-len", str(engines.max_model_len))),
            *("--kv-events-config", json.dumps(events)),
            *(() if tiers is None else ("--kv-tiers", json.dumps(tiers))),
            *(() if transfer is None else ("--kv-transfer-config", json.dumps(transfer))),
        ],
        env={"OMP_NUM_THREADS": str(len(cores))},
        cores=cores,
        grace_s=_ENGINE_DRAIN_S + _ENGINE_CLOSE_S,
        health_url=f"http://127.0.0.1:{port}/health",
    )


def _told(stack: Stack, index: int) -> str:
    """A replica as `sumibi serve --engine` is told of it; its role only where roles differ."""
    engines = stack.engines
    words = [f"http://127.0.0.1:{stack.engine_ports[index]}"]
    if stack.side_ports:
        words += [f"role={engines.roles[index]}", f"connector={engines.connector}"]
        words += [f"kv_port={port}" for port in stack.side_ports[index : index + 1]]
    return ",".join(words)


def _transfer(stack: Stack, index: int) -> dict[str, Any] | None:
    """What `sumibi engine --kv-transfer-config` is told; None: all replicas do whole runs."""
    if not (stack.engines.prefill or stack.engines.decode):
        return None
    extra: dict[str, Any] = {"host": "127.0.0.1"}
    if stack.engines.secret_file:
        extra["secret_file"] = str(Path(stack.engines.secret_file).expanduser().resolve())
    if index < len(stack.side_ports):
        extra["port"] = stack.side_ports[index]
    return {
        "kv_connector": _CONNECTORS[stack.engines.connector],
        "kv_role": _KV_ROLES[stack.engines.roles[index]],
        "kv_connector_extra_config": extra,
    }


def _band(priority: str, band: Band) -> str:
    ttl = "none" if band.ttl_s is None else band.ttl_s
    return f"{priority}:max_requests={band.max_requests},max_bytes={band.max_bytes},ttl_s={ttl}"


def _socket(state_dir: Path, name: str) -> str:
    path = str(state_dir / f"{name}.sock")
    if len(path.encode()) > SOCKET_PATH_LIMIT_BYTES:
        raise EnvironmentProblem(
            f"the path {path} is too long for a Unix socket ({SOCKET_PATH_LIMIT_BYTES} bytes):"
            " set XDG_STATE_HOME to a shorter directory"
        )
    return f"ipc://{path}"
