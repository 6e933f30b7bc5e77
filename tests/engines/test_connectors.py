"""What a prefill engine answers: what a decode engine needs of it, or an error that names the fault."""

import pytest

from sumibi.core.errors import WireError
from sumibi.engines.connectors import NIXLV2, read_prefill_answer

RETURNED = (
    b'{"do_remote_prefill": true, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h",'
    b' "remote_port": 5600, "remote_block_ids": [[1]]}'
)


@pytest.mark.parametrize(
    "answer",
    [
        b'{"kv_transfer_params": %b, "\xff": 1}' % RETURNED,
        b'{"kv_transfer_params": %b%b}' % (b"[" * 5000, b"]" * 5000),
        b'{"kv_transfer_params": {"extra": %b%b}}' % (b"[" * 5000, b"]" * 5000),
    ],
    ids=["a name that is no text", "too deep", "too deep inside"],
)
def test_an_answer_that_does_not_decode_is_an_error_of_the_wire(answer):
    with pytest.raises(WireError):
        read_prefill_answer(NIXLV2, answer)
