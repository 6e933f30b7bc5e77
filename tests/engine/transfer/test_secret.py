"""A shared secret keeps strangers out of the side channel, and costs those who know it nothing."""

import re
import socket
import time
from contextlib import ExitStack

import msgspec
import pytest

from sumibi.core.errors import ConfigError
from sumibi.engine.transfer import secret
from sumibi.engine.transfer.frames import Challenge, Channel, Hello, Proof, Refused, TransferError, Welcome
from sumibi.engine.transfer.secret import SideName, proof, proves, read_secret

OURS, OTHERS = b"a secret of our own, long enough", b"a secret of somebody, long enough"
GREETING = Hello(b"namespace", 64, None, None, b"n" * 16)
SEEDS = iter(range(301, 400))


@pytest.fixture
def files(tmp_path):
    """Files that hold these secrets, a line end behind them."""
    paths = {}
    for name, value in (("ours", OURS), ("others", OTHERS)):
        paths[name] = tmp_path / name
        paths[name].write_bytes(value + b"\n")
        paths[name].chmod(0o600)
    return paths


@pytest.fixture
def served(make_served, make_config, make_pair, files):
    """Pairs whose sides have these secrets (None: none)."""

    def config(name):
        return make_config(**({} if name is None else {"secret_file": str(files[name])}))

    return lambda of_p, of_d: (
        make_served(kv_transfer=config(of_p)),
        make_served(kv_transfer=config(of_d)),
        make_pair,
    )


def counted(engine, name, reason):
    page = engine.http.get("/metrics").text
    found = re.findall(rf'^{name}_total{{[^}}]*reason="{reason}"}} (\S+)$', page, re.M)
    return sum(map(float, found))


@pytest.mark.parametrize("protocol", ["serial", "stream"])
def test_engines_with_the_same_secret_give_the_tokens_of_one_engine(served, make_prompt, protocol):
    p, d, make_pair = served("ours", "ours")
    with p, d:
        pair, token_ids = make_pair(p, d), make_prompt(next(SEEDS), 200)
        assert p.http.get("/kv_transfer").json()["secured"] is True
        if protocol == "serial":
            answer = pair.serial(token_ids, max_tokens=8, ignore_eos=True)
        else:
            answer = pair.stream(token_ids, "once", max_tokens=8, ignore_eos=True)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert d.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert "sumibi:kv_transfer_blocks_total{" in d.http.get("/metrics").text
        assert answer["choices"][0]["token_ids"] == p.tokens(token_ids, max_tokens=8, ignore_eos=True)
        pair.idle()


@pytest.mark.parametrize("protocol", ["serial", "stream"])
@pytest.mark.parametrize(("of_p", "of_d"), [("ours", "others"), ("ours", None), (None, "ours")])
def test_others_compute_for_themselves_and_both_sides_count_why(
    served, make_prompt, eventually, caplog, of_p, of_d, protocol
):
    p, d, make_pair = served(of_p, of_d)
    with p, d:
        pair, token_ids = make_pair(p, d), make_prompt(next(SEEDS), 200)
        fields = {"max_tokens": 8, "ignore_eos": True}
        if protocol == "serial":
            answer = pair.serial(token_ids, **fields)
        else:
            answer = pair.stream(token_ids, "once", **fields)
        assert answer["choices"][0]["token_ids"] == p.tokens(token_ids, **fields)
        assert counted(d, "sumibi:kv_transfer_failures", "secret") == 1
        # One is for the pull; the decode side's word that it needs nothing more is refused as well.
        eventually(lambda: counted(p, "sumibi:kv_transfer_refusals", "secret") >= 2)
        assert counted(p, "sumibi:kv_transfer_bad_connections", "") == 0
        assert caplog.text.count("does not have the same secret as we") == 1
        for shared in (OURS, OTHERS):
            assert shared.decode() not in caplog.text
        assert "sumibi:kv_transfer_blocks_total{" not in d.http.get("/metrics").text
        p.door.engine.transfers._offers.end_all()  # nobody else may: the lease would end it
        pair.idle()


def test_a_stranger_gets_nothing_and_cannot_say_again_what_was_heard(make_served, make_config, files):
    with make_served(kv_transfer=make_config(secret_file=str(files["ours"]))) as p, ExitStack() as opened:
        side = p.door.engine.transfers._side
        page = p.http.get("/kv_transfer").json()

        def greet(hello):
            address = page["remote_host"], page["remote_port"]
            connection = opened.enter_context(socket.create_connection(address, 5.0))
            channel = Channel(connection, time.monotonic() + 5.0)
            channel.send(hello)
            return channel, channel.receive(Challenge)

        hello = Hello(side.namespace, side.memory.block_bytes, None, None, b"n" * 16)
        channel, challenge = greet(hello)
        good = proof(OURS, SideName.DECODE, hello, challenge.nonce)
        channel.send(Proof(good))
        assert isinstance(channel.receive(Welcome), Welcome)
        for said in (good, b"", challenge.proof):
            again, other = greet(hello)  # the same greeting, another number
            assert other.nonce != challenge.nonce
            again.send(Proof(said))
            with pytest.raises(TransferError) as refused:
                again.receive(Welcome)
            assert refused.value.reason == "secret"
        # Its own proof, sent back to it, is that of the other side; and of a wrong namespace nothing is said.
        again, other = greet(msgspec.structs.replace(hello, namespace=b"other"))
        again.send(Proof(other.proof))
        assert again.receive(Refused).reason == "secret"
        assert counted(p, "sumibi:kv_transfer_refusals", "secret") == 4


def test_a_proof_is_of_one_secret_one_side_one_greeting_and_one_number():
    said = proof(OURS, SideName.DECODE, GREETING, b"1" * 16)
    assert len(said) == 32
    assert proves(said, OURS, SideName.DECODE, GREETING, b"1" * 16)
    assert not proves(said, OTHERS, SideName.DECODE, GREETING, b"1" * 16)
    assert not proves(said, OURS, SideName.PREFILL, GREETING, b"1" * 16)
    assert not proves(said, OURS, SideName.DECODE, GREETING, b"2" * 16)
    for field, value in (("nonce", b"m" * 16), ("namespace", b"x"), ("engine_id", "e"), ("block_bytes", 65)):
        assert not proves(
            said, OURS, SideName.DECODE, msgspec.structs.replace(GREETING, **{field: value}), b"1" * 16
        )


def test_where_a_secret_is_read_from(files, monkeypatch, tmp_path):
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    assert read_secret(None) == (None, "")
    assert read_secret(str(files["ours"])) == (OURS, "")
    monkeypatch.setenv(secret.VARIABLE, f" {OTHERS.decode()} ")
    assert read_secret(None) == (OTHERS, "")
    assert read_secret(str(files["ours"])) == (OURS, ""), "a file that is named counts first"
    files["ours"].chmod(0o644)
    assert "chmod 600" in read_secret(str(files["ours"]))[1]
    monkeypatch.setenv(secret.VARIABLE, "short")
    with pytest.raises(ConfigError, match="SUMIBI_KV_TRANSFER_SECRET holds 5 bytes; a secret has 16"):
        read_secret(None)
    with pytest.raises(ConfigError, match=r"secret_file .*missing: cannot be read \(No such file"):
        read_secret(str(tmp_path / "missing"))
