"""The picker is gone, or not yet there: what Envoy does then, by its `failure_mode_allow`."""

import asyncio

import pytest
from faking import chat


async def kill_picker(it):
    """As a crash would: no drain."""
    it.picker.draining = True
    await it.picker.stop(0.0)


async def statuses(it):
    return [(await it.ask("/v1/models")).status, (await it.ask(body=chat())).status]


async def test_fail_closed_is_a_500_for_everything(lab):
    async with lab() as it:
        await it.start()
        assert await statuses(it) == [200, 200]
        await kill_picker(it)
        assert await statuses(it) == [500, 500]
        await it.envoy.picker_is_healthy(False)
        assert await statuses(it) == [500, 500]


@pytest.mark.parametrize("checked", [False, True], ids=["before the health check fails", "after it"])
async def test_fail_open_with_panic_threshold_0(lab, checked):
    """A body of which a piece went to the picker is lost with it; once Envoy knows, none does."""
    async with lab() as it:
        await it.start(fail_open=True)
        await kill_picker(it)
        if checked:
            await it.envoy.picker_is_healthy(False)
        assert await statuses(it) == ([200, 200] if checked else [200, 500])


async def test_fail_open_with_the_default_panic_threshold_never_opens_for_bodies(lab):
    async with lab() as it:
        await it.start(fail_open=True, panic_threshold=None)
        await kill_picker(it)
        await it.envoy.picker_is_healthy(False)
        for _ in range(3):
            assert await statuses(it) == [200, 500]


async def test_a_picker_that_comes_back_is_used_again(lab):
    async with lab() as it:
        await it.start()
        port = it.picker.grpc_port
        await kill_picker(it)
        await it.envoy.picker_is_healthy(False)
        await it.start_picker(port=port)
        await it.until(lambda: all(watch.up for watch in it.picker.watches))
        async with asyncio.timeout(10):  # Envoy's workers hear of it a moment after its admin page
            while await statuses(it) != [200, 200]:
                await asyncio.sleep(0.05)
        await it.nothing_is_held()


async def test_a_draining_picker_says_so_and_serves_on(lab):

    async with lab() as it:
        await it.start(health_checked=False)
        stopping = asyncio.create_task(it.picker.stop(1.5))
        await asyncio.sleep(0.3)
        assert it.picker.draining
        assert await statuses(it) == [200, 200]
        await stopping
        assert await statuses(it) == [500, 500]
