"""Runs the user's own check: an executable whose exit code and output give a verdict.

Exit code 0: healthy; 1: unhealthy, `leave`. If it prints JSON, one object or a list of them, the JSON counts instead:

    {"severity": "leave", "action": "reboot", "device": "ib0", "evidence": "link is down"}

Only `severity` is required. Another exit code, a timeout, or other output means that the check has failed, not the
node: `suspect`, with a sentence about the failure. The check gets the node's name in `REGROW_NODE`.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from regrow.core.exit_codes import exit_text
from regrow.core.ids import NodeId, Seconds
from regrow.core.verdicts import Action, HealthVerdict, Severity
from regrow.health.run import end_group, wait_unreaped

_MOST_BYTES = 1 << 20
_LONGEST = 300


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One verdict in the output of a check."""

    severity: Severity
    action: Action = Action.NONE
    device: str = ""
    evidence: str = ""


class _Bad(Exception):
    """The check itself has failed."""


def run_check(path: str, node: NodeId, environ: Mapping[str, str], *, within: Seconds) -> list[HealthVerdict]:
    """Run one check; returns at least one verdict."""
    source = f"check:{Path(path).name}"
    try:
        claims = _run(path, {**environ, "REGROW_NODE": node}, within)
    except _Bad as bad:
        return [HealthVerdict(node, "", Severity.SUSPECT, Action.NONE, source, f"the check itself failed: {bad}")]
    return [HealthVerdict(node, each.device, each.severity, each.action, source, each.evidence) for each in claims]


def _run(path: str, environ: Mapping[str, str], within: Seconds) -> list[Claim]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [os.path.abspath(path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            hint = " (is its first line #! and an interpreter?)" if "format" in str(error.strerror) else ""
            raise _Bad(f"{path} cannot be started: {error.strerror}{hint}") from None
        try:
            code = wait_unreaped(process.pid, within)
        finally:
            end_group(process)
        if code is None:
            raise _Bad(f"no end within {within:g} s (--check-timeout gives it more)")
        said, last = _read(out), _last_line(errors)
    words = f"; it said: {last}" if last else ""
    if code not in (0, 1):
        raise _Bad(f"it {exit_text(code)}; 0 is healthy and 1 is not{words}")
    if not said.strip():
        severity = Severity.LEAVE if code else Severity.OK
        return [Claim(severity, evidence=last or f"exit code {code}")]
    return _decode(said)


def _decode(said: bytes) -> list[Claim]:
    try:
        decoded = msgspec.json.decode(said, type=Claim | list[Claim])
    except msgspec.MsgspecError as error:
        text = said[:80].decode(errors="replace").strip()
        raise _Bad(f"its output {text!r} is not the JSON of a verdict: {error}") from None
    claims = decoded if isinstance(decoded, list) else [decoded]
    return claims or [Claim(Severity.OK, evidence="an empty list")]


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    said = file.read(_MOST_BYTES + 1)
    if len(said) > _MOST_BYTES:
        raise _Bad(f"it printed more than {_MOST_BYTES >> 20} MiB")
    return said


def _last_line(file: IO[bytes]) -> str:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _LONGEST))
    lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
