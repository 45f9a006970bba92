"""Certificates for tests."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

FAR = datetime(2037, 1, 1, tzinfo=UTC)


class Authority:
    """Signs certificates, and writes them where a test wants them."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self._ca = trustme.CA()
        self.file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, *names: str, called: str = "node", ends: datetime = FAR) -> tuple[str, str]:
        """The files of a certificate for these names and of its key."""
        made = self._ca.issue_cert(*names, not_after=ends)
        cert, key = (self._folder / f"{called}-of-{self._name}.{end}" for end in ("pem", "key"))
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        made.private_key_pem.write_to_path(str(key))
        return str(cert), str(key)


def encrypt(monkeypatch: pytest.MonkeyPatch, cert: str, key: str, ca: str = "") -> None:
    """Have this process encrypt by these files."""
    for name, path in (("CERT", cert), ("KEY", key), ("CA", ca)):
        monkeypatch.setenv(f"REGROW_TLS_{name}", path)
