"""Callers that are let in over encrypted connections, and messages about the files that encrypt them."""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from tests.process.agent_harness import spec
from tests.unit.core.tls_files import Authority, encrypt

from regrow.core import config, tls
from regrow.core.config import inherited_environment
from regrow.core.errors import UsageError
from regrow.launch import folder, options
from regrow.launch.job import HostEnvironment

NOW = datetime.now(UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def used(files: tuple[str, str], ca: Path | str = "") -> None:
        encrypt(monkeypatch, *files, str(ca))

    return used


def shake(client: ssl.SSLContext, server: ssl.SSLContext, host: str) -> str:
    """Error of a call to `host`; empty: they have met, and the server has taken the caller's certificate."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(back, there, server_hostname=host), server.wrap_bio(there, back, server_side=True)]
    try:
        for _ in range(4):
            for side in sides:
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
        sides[1].write(b"come in")
        return "" if sides[0].read(7) == b"come in" else "nothing is heard"
    except ssl.SSLError as error:
        return str(getattr(error, "verify_message", "") or error.reason or error)


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of a caller and of a server, by the present files."""
    client, server = tls.calling(), tls.serving()
    assert client is not None and server is not None
    return client, server


def test_without_files_nothing_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CERT", "KEY", "CA"):
        monkeypatch.delenv(f"REGROW_TLS_{name}", raising=False)
    assert (tls.calling(), tls.serving(), tls.check(0.0)) == (None, None, "")
    assert tls.url("host:1") == "http://host:1"


def test_nodes_with_the_same_certificate_meet(authority: Authority, use: Callable[..., None]) -> None:
    use(authority.issue("nobody.example"))
    assert tls.check(NOW.timestamp()) == ""
    assert tls.url("host:1") == "https://host:1"
    assert shake(*contexts(), "10.0.0.1") == "", "names are not compared: it is the one certificate that there is"


def test_another_certificate_of_the_same_authority_is_not_the_one(
    authority: Authority, use: Callable[..., None]
) -> None:
    use(authority.issue("one.example", called="one"))
    client, server = contexts()
    use(authority.issue("two.example", called="two"))
    other_client, other_server = contexts()
    assert "unable to get local issuer" in shake(client, other_server, "two.example")
    assert "unable to get local issuer" in shake(other_client, server, "one.example")


def test_a_whole_chain_in_the_file_does_not_let_others_in(authority: Authority, use: Callable[..., None]) -> None:
    cert, key = authority.issue("one.example", called="one")
    Path(cert).write_text(Path(cert).read_text() + authority.file.read_text())
    use((cert, key))
    assert tls.check(NOW.timestamp()) == ""
    client, server = contexts()
    use(authority.issue("two.example", called="two"))
    assert "unable to get local issuer" in shake(client, contexts()[1], "two.example")
    assert shake(client, server, "x") == ""


def test_a_caller_without_a_certificate_is_let_in_by_the_page_alone(
    authority: Authority, use: Callable[..., None]
) -> None:
    use(authority.issue("one.example"))
    stranger = ssl.create_default_context(cafile=str(authority.file))
    page = tls.serving(anybody=True)
    assert page is not None
    assert shake(stranger, page, "one.example") == ""
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in shake(stranger, contexts()[1], "one.example")


def test_with_an_authority_each_node_has_its_own_and_is_called_by_its_name(
    authority: Authority, use: Callable[..., None]
) -> None:
    use(authority.issue("10.0.0.1", called="one"), authority.file)
    assert tls.check(NOW.timestamp()) == ""
    one = contexts()
    use(authority.issue("10.0.0.2", "two.example", called="two"), authority.file)
    two = contexts()
    assert shake(one[0], two[1], "10.0.0.2") == shake(one[0], two[1], "two.example") == ""
    assert shake(two[0], one[1], "127.0.0.1") == shake(two[0], one[1], "localhost") == "", "on loopback"
    assert "IP address mismatch" in shake(one[0], two[1], "10.0.0.1")
    assert "Hostname mismatch" in shake(one[0], two[1], "three.example")


def test_what_another_authority_has_signed_is_refused(
    tmp_path: Path, authority: Authority, use: Callable[..., None]
) -> None:
    use(authority.issue("10.0.0.1"), authority.file)
    ours = contexts()
    stranger = Authority(tmp_path, "strange")
    use(stranger.issue("10.0.0.1"), stranger.file)
    theirs = contexts()
    assert "self-signed certificate in certificate chain" in shake(ours[0], theirs[1], "10.0.0.1")
    assert "self-signed certificate in certificate chain" in shake(theirs[0], ours[1], "10.0.0.1")


def test_nothing_before_tls_1_3(authority: Authority, use: Callable[..., None]) -> None:
    use(authority.issue("10.0.0.1"), authority.file)
    old = ssl.create_default_context(cafile=str(authority.file))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert "UNSUPPORTED_PROTOCOL" in shake(old, contexts()[1], "10.0.0.1")


def test_a_renewed_certificate_is_taken_for_the_next_connection(authority: Authority, use: Callable[..., None]) -> None:
    first = authority.issue("10.0.0.1", called="first")
    use(first, authority.file)
    client, server = contexts()
    assert "IP address mismatch" in shake(client, server, "10.0.0.7")
    for old, new in zip(first, authority.issue("10.0.0.7", called="second"), strict=True):
        Path(new).replace(old)
    assert contexts() == (client, server), "long-lived callers have it too"
    assert shake(client, server, "10.0.0.7") == ""


def test_half_of_a_renewal_leaves_the_former_one(authority: Authority, use: Callable[..., None]) -> None:
    first = authority.issue("10.0.0.1", called="first")
    use(first, authority.file)
    assert shake(*contexts(), "10.0.0.1") == ""
    cert, key = authority.issue("10.0.0.7", called="second")
    Path(cert).replace(first[0])
    assert shake(*contexts(), "10.0.0.1") == "", "the key is still the other one's"
    Path(key).replace(first[1])
    assert shake(*contexts(), "10.0.0.7") == ""


# --- what is said of the files ---------------------------------------------------------------------------------------


def test_a_certificate_that_all_have_does_not_run_out(authority: Authority, use: Callable[..., None]) -> None:
    ended = NOW - timedelta(days=3)
    use(authority.issue("one.example", ends=ended))
    said = tls.check(NOW.timestamp())
    assert f"ended on {ended:%Y-%m-%d}" in said and "accepted still" in said
    assert shake(*contexts(), "one.example") == ""


def test_one_of_an_authority_that_ends_soon_is_told_of(authority: Authority, use: Callable[..., None]) -> None:
    soon = NOW + timedelta(days=20)
    use(authority.issue("one.example", ends=soon), authority.file)
    assert f"ends on {soon:%Y-%m-%d}" in tls.check(NOW.timestamp())
    assert tls.check((NOW - timedelta(days=30)).timestamp()) == ""


def test_one_of_an_authority_that_has_ended_is_refused(authority: Authority, use: Callable[..., None]) -> None:
    use(authority.issue("one.example", ends=NOW - timedelta(days=3)), authority.file)
    with pytest.raises(UsageError, match="not accepted where .*: certificate has expired"):
        tls.check(NOW.timestamp())


def test_a_certificate_of_another_authority_than_the_one_named(
    tmp_path: Path, authority: Authority, use: Callable[..., None]
) -> None:
    use(authority.issue("one.example"), Authority(tmp_path, "other").file)
    with pytest.raises(UsageError, match="not accepted where .*other"):
        tls.check(NOW.timestamp())


def test_a_certificate_for_servers_alone(tmp_path: Path, use: Callable[..., None]) -> None:
    cert, key = tmp_path / "c.pem", tmp_path / "k.pem"
    private, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(private.public_key())
    made = made.serial_number(7).not_valid_before(NOW).not_valid_after(NOW + timedelta(days=9))
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    cert.write_bytes(made.sign(private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    kind, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(kind, form, serialization.NoEncryption()))
    use((str(cert), str(key)))
    with pytest.raises(UsageError, match="not accepted") as told:
        tls.check(NOW.timestamp())
    assert "good for servers and for clients" in told.value.hint


def test_a_key_of_another_certificate(authority: Authority, use: Callable[..., None]) -> None:
    cert, _ = authority.issue("one.example", called="one")
    _, key = authority.issue("one.example", called="two")
    use((cert, key))
    with pytest.raises(UsageError, match="KEY_VALUES_MISMATCH"):
        tls.check(NOW.timestamp())


def test_a_key_under_a_password(tmp_path: Path, authority: Authority, use: Callable[..., None]) -> None:
    cert, key = authority.issue("one.example")
    plain = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    locked = tmp_path / "locked.key"
    kind, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(plain.private_bytes(kind, form, serialization.BestAvailableEncryption(b"secret")))
    use((cert, str(locked)))
    with pytest.raises(UsageError, match="under a password"):
        tls.check(NOW.timestamp())


def test_a_file_that_is_not_there(authority: Authority, use: Callable[..., None]) -> None:
    use((authority.issue("one.example")[0], "/nowhere/key.pem"))
    with pytest.raises(UsageError, match=r"by /nowhere/key\.pem: No such file"):
        tls.check(NOW.timestamp())


def test_half_of_the_files(authority: Authority, use: Callable[..., None]) -> None:
    use(("", authority.issue("one.example")[1]))
    with pytest.raises(UsageError, match="needs --tls-cert too, where --tls-key is given"):
        tls.check(NOW.timestamp())


# --- where they are given --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [options.of_run, options.of_agent])
def test_flags_are_for_all_processes_that_this_one_starts(
    of: Callable[[Any], Any], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.issue("one.example")
    encrypt(monkeypatch, "", "")  # so that what is set is put back
    seen: list[object] = []

    @click.command()
    @of
    def command(**words: object) -> None:
        seen.extend([config.tls_files(), sorted(word for word in words if "tls" in word)])

    monkeypatch.chdir(Path(cert).parent)
    command(["--tls-cert", Path(cert).name, "--tls-key", key], standalone_mode=False)
    assert seen == [config.TlsFiles(cert, key), []]
    assert inherited_environment()["REGROW_TLS_CERT"] == cert


def test_who_asks_a_job_on_its_machine_encrypts_as_it_does(
    authority: Authority, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.issue("one.example")
    use((cert, key), authority.file)
    entry = folder.describe(spec(), "10.0.0.1:1", "token", command=[], log_dir="")
    encrypt(monkeypatch, "", "")
    assert config.tls_files() is None
    msgspec.json.decode(msgspec.json.encode(entry), type=folder.JobEntry).encrypt()
    assert config.tls_files() == config.TlsFiles(cert, key, str(authority.file))


@pytest.mark.parametrize(
    ("around", "bind", "said"),
    [
        ({}, "127.0.0.1", []),
        ({}, "10.0.0.1", ["the job's token and its state cross the network in clear: give --tls-cert and --tls-key"]),
        ({"encrypted": True}, "10.0.0.1", []),
        ({"encrypted": True, "certificate": "it ends soon"}, "10.0.0.1", ["it ends soon"]),
    ],
)
def test_a_job_that_others_can_reach_says_what_they_can_read(
    around: dict[str, Any], bind: str, said: list[str], tmp_path: Path
) -> None:
    here = HostEnvironment(cpus=1, gpus=0, stamp="s", jobs_home=tmp_path, **around)
    assert here.notes(bind) == said
