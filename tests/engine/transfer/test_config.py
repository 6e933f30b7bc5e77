"""What a user says of transfers: what is wrong is named, with what the field takes."""

import pytest

from sumibi.core.errors import ConfigError
from sumibi.engine.transfer.config import parse_kv_transfer


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('"kv_connector": "nixl", "kv_role": "kv_both"', "kv_connector`; it takes NixlConnector, NixlPull"),
        ('"kv_connector": "stream", "kv_role": "prefill"', "it takes kv_producer, kv_consumer, kv_both"),
        ('"kv_connector": "stream", "kv_role": "kv_both", "kv_buffer_device": "gpu"', "it takes cpu"),
        (
            '"kv_connector": "stream", "kv_role": "kv_both", '
            '"kv_connector_extra_config": {"transports": ["x"]}',
            "it takes shm, tcp",
        ),
        (
            '"kv_connector": "stream", "kv_role": "kv_both", "kv_connector_extra_config": {"transports": []}',
            "length >= 1.*transports`; it takes shm, tcp",
        ),
        (
            '"kv_connector": "stream", "kv_role": "kv_both", "kv_connector_extra_config": {"port": 99999}',
            "99999.*port`$",
        ),
    ],
)
def test_a_wrong_field_is_told_with_its_value_and_what_it_takes(said, told):
    with pytest.raises(ConfigError, match=f"^--kv-transfer-config .*{told}"):
        parse_kv_transfer(f"{{{said}}}")
