"""TLS between Envoy and the picker, which is how it is unless somebody says otherwise."""

from faking import chat

from sumibi.gateway.epp.tls import self_signed


def write(directory, key, certificate):
    (directory / "tls.key").write_bytes(key)
    (directory / "tls.crt").write_bytes(certificate)


async def test_a_self_signed_certificate_does(lab):
    async with lab() as it:
        await it.start(picker_secure=True, tls=True)
        assert (await it.ask(body=chat())).status == 200
        await it.nothing_is_held()


async def test_certificates_in_files_are_read_again_when_they_change(lab, tmp_path):
    async with lab() as it:
        write(tmp_path, *self_signed())
        await it.start(picker_secure=True, picker_cert_path=tmp_path, tls=True)
        assert (await it.ask(body=chat())).status == 200
        write(tmp_path, *self_signed())
        await it.start_envoy(tls=True)
        assert (await it.ask(body=chat())).status == 200
        (tmp_path / "tls.key").write_text("no key")
        await it.start_envoy(tls=True)
        assert (await it.ask(body=chat())).status == 200  # with the one before
        await it.nothing_is_held()
