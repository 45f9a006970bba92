"""Encryption of connections between nodes: one setting for a whole job, `$REGROW_TLS_CERT`, `_KEY` and `_CA`.

Both ends of a connection show a certificate (TLS 1.3). Without a CA all nodes have the same certificate, and no other
is accepted; it may be self-signed, and does not expire in the middle of a job. With a CA each node may have its own:
any certificate signed by that CA is accepted, and a caller compares the host name that it calls with those in the
certificate, except on loopback. A certificate renewed on disk is used for all connections made after that.
"""

import os
import ssl
import threading
import time
from pathlib import Path
from typing import Any

from regrow.core.config import TlsFiles, tls_files
from regrow.core.errors import UsageError
from regrow.core.hosts import is_loopback
from regrow.core.ids import Seconds

SOON: Seconds = 30 * 86400.0
"""A certificate that expires within this time causes a warning at the start."""
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, for which Python has no name."""
_PEM_END = "-----END CERTIFICATE-----"
_OWN_NAME = "localhost"
ALIKE = "give --tls-cert and --tls-key on all nodes of a job or on none, without --tls-ca the same ones"
"""Hint for two nodes that cannot connect to each other."""


def serving(*, anybody: bool = False) -> ssl.SSLContext | None:
    """TLS context for a server in this process; None without encryption. Raises `UsageError`.

    Args:
        anybody: whether callers without a certificate may connect too: a browser, a scraper of metrics.
    """
    pair = _pair()
    if pair is None:
        return None
    return pair.open_to_all if anybody else pair.server


def calling() -> ssl.SSLContext | None:
    """TLS context for a caller in this process; None without encryption. Raises `UsageError`."""
    pair = _pair()
    return pair.client if pair is not None else None


def url(address: str) -> str:
    """URL of a job's server at this `host:port`."""
    return f"{'http' if tls_files() is None else 'https'}://{address}"


def check(now: Seconds) -> str:
    """Check that the TLS files fit together, before any call; returns a warning, or an empty text.

    Args:
        now: seconds since the epoch.

    Raises:
        UsageError: a file is wrong; the text says which one, and why.
    """
    files = tls_files()
    if files is None:
        return ""
    pair = _Pair(files)
    ends = _meet(pair)
    left = ends - now
    text = f"the certificate {files.cert} "
    until = time.strftime("%Y-%m-%d", time.gmtime(ends))
    if not files.ca:  # with a shared certificate the file itself is trusted, whatever its dates
        return f"{text}ended on {until}; as the one that all nodes have it is accepted still" if left <= 0 else ""
    if left <= 0:
        raise UsageError(f"{text}ended on {until}", hint="renew it")
    return f"{text}ends on {until}: put a new one in its place before" if left < SOON else ""


class _Calling(ssl.SSLContext):
    """TLS context of a caller that compares host names, except on loopback, where certificates have other names."""

    unnamed: ssl.SSLContext

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        if is_loopback(str(kwargs.get("server_hostname"))):
            return self.unnamed.wrap_socket(*args, **kwargs)
        return super().wrap_socket(*args, **kwargs)

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        if is_loopback(str(kwargs.get("server_hostname"))):
            return self.unnamed.wrap_bio(*args, **kwargs)
        return super().wrap_bio(*args, **kwargs)


class _Pair:
    """The server's and the caller's context for one setting. Raises `UsageError`."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.open_to_all = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        unnamed = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        unnamed.check_hostname = False
        self.client: ssl.SSLContext = unnamed
        self._all = [self.server, unnamed, self.open_to_all]
        if files.ca:
            named = self.client = _Calling(ssl.PROTOCOL_TLS_CLIENT)
            named.unnamed = unnamed
            self._all.append(named)
        self.seen: tuple[float, ...] = ()
        for context in self._all:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_NONE if context is self.open_to_all else ssl.CERT_REQUIRED
            if not files.ca:
                context.verify_flags |= ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
        self.read(_times(files))

    def read(self, seen: tuple[float, ...]) -> None:
        """Load the files as they are now."""
        files, reading = self.files, self.files.cert
        try:
            for reading in filter(None, (files.cert, files.key, files.ca)):
                Path(reading).read_bytes()  # the libraries do not report which file they cannot read
            # A context loses its certificate when it fails to load another, so a spare one is tried first.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._all):
                reading = f"{files.cert} with {files.key}"
                context.load_cert_chain(files.cert, files.key, password=_no_password)
                reading = files.ca or files.cert
                if files.ca:
                    context.load_verify_locations(files.ca)
                else:  # trust this certificate itself, not its issuer, which has issued others too
                    own, _, _ = Path(files.cert).read_text(encoding="utf-8").partition(_PEM_END)
                    context.load_verify_locations(cadata=own + _PEM_END)
        except (OSError, ValueError) as error:  # `ssl.SSLError` is an `OSError`
            raise UsageError(
                f"TLS cannot be set up by {reading}: "
                f"{getattr(error, 'reason', '') or getattr(error, 'strerror', '') or error}",
                hint="give --tls-cert and --tls-key as PEM files, the key without a password",
            ) from error
        self.seen = seen


def _no_password() -> str:
    raise ValueError("the key is kept under a password")


def _times(files: TlsFiles) -> tuple[float, ...]:
    try:
        return tuple(os.stat(path).st_mtime for path in (files.cert, files.key, files.ca) if path)
    except OSError:
        return ()  # a file is being replaced at this moment


_lock = threading.Lock()
_made: dict[TlsFiles, _Pair] = {}


def _pair() -> _Pair | None:
    files = tls_files()
    if files is None:
        return None
    with _lock:
        pair = _made.get(files)
        if pair is None:
            pair = _made[files] = _Pair(files)
            return pair
        times = _times(files)
        if times and times != pair.seen:
            try:
                pair.read(times)
            except UsageError:  # only some files are renewed: keep using the former ones until all are
                pair.seen = ()
        return pair


def _meet(pair: _Pair) -> Seconds:
    """Connect this node to itself by TLS; returns the time at which its certificate expires."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = pair.server.wrap_bio(there, back, server_side=True)
    client = pair.client.wrap_bio(back, there, server_hostname=_OWN_NAME)
    files = pair.files
    waiting: list[ssl.SSLObject] = [client, server]
    try:
        for _ in range(8):  # a TLS 1.3 handshake has three flights
            for side in list(waiting):
                try:
                    side.do_handshake()
                    waiting.remove(side)
                except ssl.SSLWantReadError:
                    continue
        certificate = client.getpeercert()
    except ssl.SSLError as error:
        raise UsageError(
            f"the certificate {files.cert} is not accepted where {files.ca or files.cert} is trusted: "
            f"{getattr(error, 'verify_message', '') or error.reason}",
            hint="both sides of a connection show it: it has to be good for servers and for clients",
        ) from error
    if waiting or not certificate:
        raise UsageError(f"a TLS connection with {files.cert} does not come about", hint="is it a TLS 1.3 certificate?")
    return ssl.cert_time_to_seconds(str(certificate["notAfter"]))
