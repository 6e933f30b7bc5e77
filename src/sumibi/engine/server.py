"""`sumibi engine`: one process that serves one model. Puts the parts together and ends them in order.

Nothing heavy is imported before `main` has checked what can be checked without it: a port in use is told
in a tenth of a second.
"""

import asyncio
import contextlib
import logging
import math
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from sumibi.core.errors import EnvironmentProblem
from sumibi.engine.options import EngineOptions

if TYPE_CHECKING:
    from sumibi.engine.app import Door
    from sumibi.engine.publisher import ZmqPublisher

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE_S = 75
"""Idle connections stay open for so long: gateways reuse them, and should be the ones to close them."""
_FLUSH_S = 5
"""After the grace time aborted streams have this long to be sent to their end."""
_POLL_S = 0.01
_HUGE_PAGES = "glibc.malloc.hugetlb"


def main(options: EngineOptions) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises SumibiError for what cannot work.

    Either signal ends the process with 0, also while it loads.
    """
    _use_huge_pages()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listener = listen(options)
    with contextlib.closing(listener):
        # Until requests are taken there is nothing to finish: end at once, whatever is being loaded.
        for number in _SIGNALS:
            signal.signal(number, lambda *_: sys.exit(0))
        import uvloop

        from sumibi.engine.assembly import assemble

        stop = asyncio.Event()
        door, publisher = assemble(options, on_failure=stop.set)
        return uvloop.run(_until_signal(options, door, publisher, listener, stop))


def _use_huge_pages() -> None:
    """Start this very process anew with transparent huge pages for malloc: 7 to 12 % faster steps.

    glibc reads the setting when a process starts, so it cannot be set from within. Same process id, and
    nothing but the command line's own modules has been imported yet.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES in tunables or platform.libc_ver()[0] != "glibc":
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, [tunables, f"{_HUGE_PAGES}=1"]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def listen(options: EngineOptions) -> socket.socket:
    """Bind now, listen when the model is loaded. Raises EnvironmentProblem naming the flag."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as cause:
        listener.close()
        raise _port_in_use(options, cause) from cause
    return listener


def _port_in_use(options: EngineOptions, cause: OSError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"--port {options.port}: cannot listen on {options.host}:{options.port} ({cause.strerror}); "
        "does another engine run there? --port 0 takes a free one"
    )


async def _until_signal(
    options: EngineOptions,
    door: "Door",
    publisher: "ZmqPublisher | None",
    listener: socket.socket,
    stop: asyncio.Event,
) -> int:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, stop.set)

    def ready(url: str) -> None:
        print(f"sumibi engine: {options.name} is ready on {url}", flush=True)

    return await serve(options, door, publisher, listener, stop=stop, ready=ready)


async def serve(
    options: EngineOptions,
    door: "Door",
    publisher: "ZmqPublisher | None",
    listener: socket.socket,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None],
) -> int:
    """Serve what `assemble` made on the bound `listener` until `stop`; 0, or 1 if the engine failed.

    `ready` is called with the URL once requests are taken. After `stop` no more connections are; running
    requests may finish, for `options.shutdown_grace_s`, then they are ended with what they have.
    """
    import uvicorn

    config = uvicorn.Config(
        door.app(),
        http="httptools",
        lifespan="on",
        access_log=False,
        log_config=None,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(options.shutdown_grace_s) + _FLUSH_S,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # signals are the caller's
    if publisher is not None:
        publisher.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(_POLL_S)
        if server.started:
            host, port = listener.getsockname()[:2]
            ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        asyncio.get_running_loop().call_later(options.shutdown_grace_s, door.engine.abort_all)
        await serving
    except OSError as cause:
        if server.started:
            raise
        # Both were bound while neither listened; the other was faster.
        raise _port_in_use(options, cause) from cause
    finally:
        stopping.cancel()
        if publisher is not None:
            publisher.stop()
    return 1 if door.engine.failed else 0
