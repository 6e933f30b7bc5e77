"""Real vLLM servers for tests, started once and shared: a start takes longer than most tests.

A test that needs a server of its own calls `start_engine`; what it starts is stopped when the run ends. A
test that stops one of the shared servers starts it again. Nothing is skipped: without the environment that
`make vllm` builds, every test here is an error that says so.
"""

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from vllm_harness import BLOCK, MODEL, REPOSITORY, Engine, GatewayThread, VllmEnvironment, timeouts

from sumibi.gateway.options import EngineOption, GatewayOptions

KV_BLOCKS = 200
"""Of each shared engine: 6,400 tokens, so that tests evict."""
StartEngine = Callable[..., Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(900))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def model(smollm2: Path) -> Path:
    """The directory that the engines serve; `make setup` makes it."""
    assert (smollm2 / "model.safetensors").exists(), f"there is no model in {smollm2}: run `make setup`"
    return smollm2


@pytest.fixture(scope="session")
def start_engine(model: Path) -> Iterator[StartEngine]:
    """Start `vllm serve` with more arguments; call `wait_ready` on what comes back.

    `half` 0 or 1 names which half of the cores computes, None takes all. `nixl` adds a side channel, and the
    connector unless `kv_transfer` gives a whole `--kv-transfer-config`. `pythonpath` is for connectors of
    our own.
    """
    vllm = VllmEnvironment()
    started: list[Engine] = []

    def start(
        name: str,
        *arguments: str,
        half: int | None = None,
        dtype: str = "float32",
        kv_blocks: int = KV_BLOCKS,
        nixl: bool = False,
        kv_transfer: Mapping[str, object] | None = None,
        variables: Mapping[str, str] | None = None,
        pythonpath: Sequence[Path] = (),
        scratch: Path,
    ) -> Engine:
        port, events, replay = free_port(), f"tcp://*:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        if half == 1:  # the other kind of address that engines publish at
            events, replay = f"ipc://{scratch}/{name}.events", f"ipc://{scratch}/{name}.replay"
        given = dict(vllm.variables(_cores(half)), **(variables or {}))
        if pythonpath:
            given["PYTHONPATH"] = os.pathsep.join(str(path) for path in pythonpath)
        command = [str(vllm.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", MODEL]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enforce-eager"]
        command += ["--max-model-len", "4096", "--max-num-seqs", "8", "--block-size", str(BLOCK)]
        command += ["--num-gpu-blocks-override", str(kv_blocks), "--enable-prompt-tokens-details"]
        source = {"endpoint": events, "replay_endpoint": replay, "buffer_steps": 100_000}
        source |= {"enable_kv_cache_events": True, "publisher": "zmq"}
        command += ["--kv-events-config", json.dumps(source)]
        if nixl:
            given["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
            given["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            kv_transfer = kv_transfer or {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cpu",
                # 30 s run out where two engines share two busy cores with others.
                "kv_connector_extra_config": {"kv_lease_duration": 300},
            }
        if kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer)]
        log = REPOSITORY / "out" / "vllm" / f"{name}.log"
        log.unlink(missing_ok=True)
        engine = Engine(name, port, [*command, *arguments], given, log, replay=replay)
        started.append(engine)
        engine.start()
        return engine

    try:
        yield start
    finally:
        for engine in started:
            engine.stop()
            engine.client.close()


def _cores(half: int | None) -> str:
    cores = sorted(os.sched_getaffinity(0))
    if half is not None and len(cores) > 1:
        middle = len(cores) // 2
        cores = cores[middle:] if half else cores[:middle]
    return ",".join(str(core) for core in cores)


_SHARED = ("--enable-scale-out", "--trust-request-chat-template")
_SHARED += ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="session")
def _first(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return start_engine("first", *_SHARED, half=0, scratch=tmp_path_factory.mktemp("sockets"))


@pytest.fixture(scope="session")
def _second(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return start_engine("second", *_SHARED, half=1, scratch=tmp_path_factory.mktemp("sockets"))


@pytest.fixture(scope="session")
def engines(_first: Engine, _second: Engine) -> tuple[Engine, Engine]:
    """Two engines, half of the cores each, in float32.

    Without NIXL: with it one thread never sleeps and takes half of an engine's only core.
    """
    return _first.wait_ready(), _second.wait_ready()


@pytest.fixture(scope="session")
def first_engine(_first: Engine) -> Engine:
    """The first of them, for tests that need but one."""
    return _first.wait_ready()


@pytest.fixture
def start_gateway(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., GatewayThread]]:
    """Start a gateway before these engines, wait until it follows them, stop it after the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with ExitStack() as stop:

        def start(*engines: Engine, **options: object) -> GatewayThread:
            options.setdefault("engines", tuple(EngineOption(engine.url) for engine in engines))
            options.setdefault("admin_port", None)
            gateway = GatewayThread(
                GatewayOptions(port=0, tokenizer=model, timeouts=timeouts(), **options)  # type: ignore[arg-type]
            )
            stop.callback(gateway.close)
            gateway.wait_exact(*engines)
            return gateway

        yield start
