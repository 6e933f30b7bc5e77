"""The gateway as a process: signals, exit codes, what it says when it cannot start."""

import asyncio
import os
import signal
import socket
import sys


async def serve(it, *words):
    """Start `sumibi serve`; wait until it answers. (process, port)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sumibi", "serve", "--port", str(port), "--admin-port", "0", *words),
        env={**os.environ, "XDG_STATE_HOME": str(it.directory / "state")},
        stderr=asyncio.subprocess.PIPE,
    )
    return process, port


async def test_the_first_signal_drains_and_the_second_ends_at_once(lab, behaviours, client_of):
    async with lab() as it:
        engine = await it.engine()
        engine.behave = behaviours.hang
        process, port = await serve(it, "--engine", engine.url)
        try:
            while b"is up" not in await process.stderr.readline():
                pass
            async with client_of(port) as client:
                body = {"model": "test-model", "messages": [{"role": "user", "content": "hello"}]}
                asked = asyncio.ensure_future(client.ask("/v1/chat/completions", body))
                await it.until(lambda: len(engine.requests) == 1)
                process.send_signal(signal.SIGTERM)
                while b"stopping: 1 requests in flight" not in await process.stderr.readline():
                    pass
                assert process.returncode is None
                process.send_signal(signal.SIGTERM)
                assert (await asked).status == 503
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def test_a_wrong_flag_is_an_exit_with_its_name(lab):
    async with lab() as it:
        process, _ = await serve(it, "--engine", "not-a-url")
        _, said = await process.communicate()
        assert process.returncode == 2
        assert b"--engine 'not-a-url'" in said
        assert b"Traceback" not in said
