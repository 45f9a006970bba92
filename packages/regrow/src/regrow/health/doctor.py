"""`regrow doctor`: runs all probes and the user's checks on demand, and prints a table or JSON."""

import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regrow.core.config import inherited_environment, state_home, visible_gpus
from regrow.core.errors import UsageError
from regrow.core.exit_codes import OK
from regrow.core.ids import NodeId, Seconds
from regrow.core.verdicts import Action, Severity
from regrow.health.examination import Examination, examine
from regrow.health.probes import PROBES, QUICK
from regrow.health.readings import ProbeSettings

UNFIT = 1
"""Exit code if a verdict is `leave` or `fatal`."""
_STYLES = {Severity.OK: "green", Severity.SUSPECT: "yellow", Severity.LEAVE: "red", Severity.FATAL: "bold red"}


def run_doctor(
    *,
    checks: Sequence[str] = (),
    check_timeout: Seconds = 30.0,
    peers: Sequence[str] = (),
    node: str = "",
    quick: bool = False,
    json_file: str = "",
) -> int:
    """Examine this machine and print the verdicts; returns the exit code: 1 if a verdict is `leave` or `fatal`.

    `json_file`: also write JSON to this file; `-`: print JSON instead of the table.

    Raises:
        UsageError: a peer's address is invalid.
    """
    for peer in peers:
        host, colon, port = peer.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 1 << 16):
            raise UsageError(f"--peer {peer!r} is no address", hint="write HOST:PORT, of anything that listens there")
    settings = ProbeSettings(str(state_home()), list(peers), visible=visible_gpus())
    found = examine(
        NodeId(node or socket.gethostname()),
        settings,
        QUICK if quick else list(PROBES),
        checks,
        inherited_environment(),
        within=check_timeout,
    )
    console = Console()
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"
    if json_file == "-":
        console.file.write(text)
    else:
        console.print(table(found))
        if json_file:
            Path(json_file).write_text(text, encoding="utf-8")
    return UNFIT if found.worst.failed else OK


def table(found: Examination) -> Table:
    """An examination as a table."""
    drawn = Table(
        title=f"{found.node}: {found.worst} ({found.seconds:.1f} s)", title_justify="left", box=None, pad_edge=False
    )
    for head in ("CHECK", "DEVICE", "VERDICT", "ACTION", "EVIDENCE"):
        drawn.add_column(head, overflow="fold")
    for each in found.verdicts:
        action = "" if each.action is Action.NONE else str(each.action)
        verdict = Text(str(each.severity), style=_STYLES[each.severity])
        drawn.add_row(each.source, Text(each.device), verdict, action, Text(each.evidence))
    for unread in found.not_applicable:
        drawn.add_row(unread.source, Text(unread.device), Text("–", style="dim"), "", Text(unread.reason, style="dim"))
    return drawn
