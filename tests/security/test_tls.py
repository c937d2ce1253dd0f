"""TLS against a real server: who cannot prove to be the broker, or the client, is refused in one message."""

import contextlib
import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import BINARIES, server

from srl.base.errors import BrokerError, BrokerUnreachableError
from srl.runner.distribution import RedisParameters
from srl.runner.distribution.broker import Broker

PASSWORD = "a password"


def has_tls(binary: str | None) -> bool:
    if binary is None:
        return False
    # Without a certificate it ends in either case.
    done = subprocess.run([binary, "-"], input="port 0\ntls-port 1\n", capture_output=True, text=True, timeout=10)
    return "No tls-cert-file" in done.stdout


TLS_SERVERS = [binary for binary in BINARIES.values() if binary and has_tls(binary)]
pytestmark = pytest.mark.skipif(
    not TLS_SERVERS or shutil.which("openssl") is None, reason="no server with TLS is installed, or no openssl"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, `ca` and `other`; certificates of `ca` for the server and a client, one of `other`."""
    directory = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        openssl("req", "-x509", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        (directory / "names").write_text("subjectAltName=DNS:localhost\n")
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed_by = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed_by, "-out", f"{name}.pem", "-extfile", "names")
    return directory


@contextlib.contextmanager
def tls_server(folder: Path, *, clients: bool) -> Iterator[RedisParameters]:
    lines = [
        f"tls-cert-file {folder / 'server.pem'}",
        f"tls-key-file {folder / 'server.key'}",
        f"tls-ca-cert-file {folder / 'ca.pem'}",
        f"tls-auth-clients {'yes' if clients else 'no'}",
        f'requirepass "{PASSWORD}"',
    ]
    with server(TLS_SERVERS[0], folder, *lines, port_option="tls-port") as port:
        certificate = {"ssl_certfile": str(folder / "client.pem"), "ssl_keyfile": str(folder / "client.key")}
        parameters = RedisParameters(
            host="localhost",
            port=port,
            password=PASSWORD,
            ssl=True,
            ssl_ca_certs=str(folder / "ca.pem"),
            **(certificate if clients else {}),
        )
        parameters.wait_until_reachable(timeout_s=20)
        yield parameters


def works(parameters: RedisParameters) -> bool:
    with contextlib.closing(Broker(parameters)) as broker:
        return broker.tasks() == []


def test_a_server_is_trusted_for_its_authority_and_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tls_server(folder, clients=False) as known:
        assert works(known)
        for name, value in known.to_env().items():
            monkeypatch.setenv(name, value)
        assert works(RedisParameters()), "a worker is given all of it by its environment"
        for changes in (
            {"ssl_ca_certs": str(folder / "other.pem")},
            {"ssl_ca_certs": None},  # the system's authorities
            {"host": "127.0.0.1"},  # which the certificate does not name
        ):
            with pytest.raises(BrokerError, match=r"certificate of the broker .* is not trusted .*ssl_ca_certs"):
                dataclasses.replace(known, **changes).wait_until_reachable(timeout_s=10)
        assert works(dataclasses.replace(known, host="127.0.0.1", ssl_check_hostname=False))
        with pytest.raises(BrokerError, match="refused the log-in"):
            dataclasses.replace(known, password="wrong").wait_until_reachable(timeout_s=10)
        plain = RedisParameters(host="localhost", port=known.port, password=PASSWORD)
        with pytest.raises(BrokerUnreachableError):
            plain.wait_until_reachable(timeout_s=1)


def test_a_client_proves_who_it_is(folder: Path) -> None:
    with tls_server(folder, clients=True) as known:
        assert works(known)
        for changes in (
            {"ssl_certfile": None, "ssl_keyfile": None},
            {"ssl_certfile": str(folder / "stranger.pem"), "ssl_keyfile": str(folder / "stranger.key")},
        ):
            with pytest.raises(BrokerError, match=r"wants a certificate of this side.*ssl_certfile"):
                dataclasses.replace(known, **changes).wait_until_reachable(timeout_s=3)
