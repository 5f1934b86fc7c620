"""The secret of a cluster, and what both ends of a stream derive from it.

All hosts have the same secret, hence the same Ed25519 key and the same self-signed certificate,
which is the only one that they trust: TLS 1.3 with certificates on both sides admits whoever has
the secret, and no other process. The process that reads the secret writes what its workers need
into the private run directory; no secret is in a command line.
"""

import datetime
import functools
import hmac
import os
import secrets
import ssl
from pathlib import Path

from sgl_pipeline.errors import ConfigurationError

KEY_VARIABLE = "SGL_PIPELINE_CLUSTER_KEY"
# A shorter one could be guessed by anyone who has seen the certificate.
FEWEST_CHARACTERS = 32
MAKE_ONE = "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"

_IDENTITY_FILE = "cluster-identity.pem"
_GREETING_KEY_FILE = "cluster-greeting.key"


def read_secret(key_file: str | None, needed_by: str = "several hosts (--nnodes)") -> bytes:
    """The cluster's secret, from a file, else from the environment.

    Raises ConfigurationError where there is none, which says who needs it, or one that is too
    short.
    """
    source = f"--cluster-key-file {key_file}" if key_file else KEY_VARIABLE
    if key_file:
        try:
            secret = Path(key_file).read_bytes().strip()
        except OSError as error:
            raise ConfigurationError(f"{source}: {error.strerror}; {MAKE_ONE}") from error
    else:
        secret = os.environ.get(KEY_VARIABLE, "").strip().encode()
        if not secret:
            raise ConfigurationError(
                f"{needed_by} need a key that all of them share, in --cluster-key-file or "
                f"{KEY_VARIABLE}; {MAKE_ONE}"
            )
    if len(secret) < FEWEST_CHARACTERS:
        raise ConfigurationError(
            f"{source} has {len(secret)} characters, at least {FEWEST_CHARACTERS} are needed; "
            f"{MAKE_ONE}"
        )
    return secret


def own_or_new_secret(key_file: str | None) -> bytes:
    """The cluster's secret where one is given, else a new one, for a head that hands it on."""
    if key_file or os.environ.get(KEY_VARIABLE, "").strip():
        return read_secret(key_file)
    return secrets.token_hex(32).encode()


def write_identity(secret: bytes, directory: str) -> None:
    """Writes what processes of this host need to talk to those of others into `directory`, which
    must be private (mode 0700)."""
    for name, content in (
        (_IDENTITY_FILE, _identity_pem(derive(secret, b"identity"))),
        (_GREETING_KEY_FILE, derive(secret, b"greeting")),
    ):
        descriptor = os.open(os.path.join(directory, name), os.O_CREAT | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)


def derive(secret: bytes, purpose: bytes) -> bytes:
    """32 bytes for one purpose (HKDF-Extract and one block of Expand, RFC 5869, SHA-256)."""
    extracted = hmac.digest(b"sgl_pipeline cluster 1", secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")


@functools.cache
def greeting_key(directory: str) -> bytes:
    """The key that greetings at the cluster port are authenticated with."""
    return Path(directory, _GREETING_KEY_FILE).read_bytes()


@functools.cache
def tls_context(directory: str, *, is_server: bool) -> ssl.SSLContext:
    """TLS for either end of a stream between two processes that have the secret."""
    protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # There is one certificate, of no host in particular.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    path = os.path.join(directory, _IDENTITY_FILE)
    context.load_verify_locations(path)
    context.load_cert_chain(path)
    if is_server:
        context.num_tickets = 0  # whoever only sends would never read them
    return context


def _identity_pem(seed: bytes) -> bytes:
    """The private key and its certificate: the same bytes wherever the seed is the same."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sgl_pipeline cluster")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
