"""The configuration that docs/epp.md shows is one that works."""

import re
from pathlib import Path

import yaml
from envoy_lab import Envoy, free_port
from faking import chat

PAGE = Path(__file__).resolve().parents[2] / "docs" / "epp.md"


async def test_the_page_s_configuration_routes_requests(lab):
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    async with lab() as it:
        await it.start_first(2)
        ports = {8080: free_port(), 9002: it.picker.grpc_port}
        ports |= {8001 + number: engine.port for number, engine in enumerate(it.engines)}
        for known, port in ports.items():
            assert f"port_value: {known}}}" in text
            text = text.replace(f"port_value: {known}}}", f"port_value: {port}}}")
        it.envoy = Envoy(it.directory, content=yaml.safe_load(text), port=ports[8080])
        it.envoys.append(it.envoy)
        await it.envoy.start()
        await it.envoy.picker_is_healthy(True)
        for _ in range(3):
            assert (await it.ask(body=chat(stream=True))).status == 200
        await it.nothing_is_held()
        assert it.picker.picker.states_served
        assert it.picker.picker.ends == {"completed": 3}
