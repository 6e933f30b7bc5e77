"""The picker's certificate: given in files, which are read again when they change, or made at start.

A made one proves nothing, and need not: gateways do not verify a picker's certificate, they want the channel
encrypted.
"""

import datetime
import logging
from pathlib import Path
from typing import Final

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sumibi.core.errors import ConfigError

_YEARS: Final = 10

log = logging.getLogger(__name__)


def credentials(directory: Path | None) -> grpc.ServerCredentials:
    """Of the server. Raises ConfigError if `directory` has no usable tls.crt and tls.key."""
    if directory is None:
        return grpc.ssl_server_credentials([self_signed()])
    files = _Files(directory)
    return grpc.dynamic_ssl_server_credentials(files.configuration(), files.renewed)


def self_signed() -> tuple[bytes, bytes]:
    """(key, certificate), PEM, for ten years."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sumibi endpoint picker")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
    )


class _Files:
    """tls.crt and tls.key in a directory (as Kubernetes mounts a secret of type kubernetes.io/tls)."""

    def __init__(self, directory: Path) -> None:
        self._key, self._certificate = directory / "tls.key", directory / "tls.crt"
        try:
            self._seen = self._changed()
            self._read()
        except (OSError, ValueError) as cause:
            raise ConfigError(f"--cert-path {directory}: want tls.crt and tls.key there: {cause}") from cause

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """What is in the files now. Raises OSError, ValueError."""
        return grpc.ssl_server_certificate_configuration([self._read()])

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """For each new connection: what is in the files if they changed; None: go on with what there was."""
        try:
            changed = self._changed()
            if changed == self._seen:
                return None
            configuration = self.configuration()
        except (OSError, ValueError) as cause:
            log.error("the certificate changed and cannot be used (%s): going on with the old one", cause)
            return None
        self._seen = changed
        log.info("the certificate was renewed")
        return configuration

    def _changed(self) -> tuple[int, int]:
        return self._key.stat().st_mtime_ns, self._certificate.stat().st_mtime_ns

    def _read(self) -> tuple[bytes, bytes]:
        key, certificate = self._key.read_bytes(), self._certificate.read_bytes()
        public = serialization.load_pem_private_key(key, None).public_key()
        if x509.load_pem_x509_certificate(certificate).public_key() != public:
            raise ValueError("they do not belong together")
        return key, certificate
