"""The meaning of an NVIDIA driver Xid for a node. Pure.

From the "resolution bucket (immediate action)" of NVIDIA's catalog for Ampere and newer,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html: RESET_GPU and the workflows that end in a reset
are `leave`/`reset`, RESTART_BM is `fatal`/`reboot`, CHECK_MECHANICALS `leave`/`replace`. RESTART_APP and IGNORE concern
applications, or errors that are already repaired: the node is `ok`. Numbers not in the table are `suspect`.
"""

from typing import NamedTuple

from regrow.core.verdicts import Action, Severity


class XidMeaning(NamedTuple):
    """Consequence of one Xid for its node; `name`: a readable name."""

    severity: Severity
    action: Action
    name: str


_RESET = {
    46: "GPU stopped processing",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "memory remapping failed",
    74: "NVLink error",
    95: "uncontained memory error",
    109: "context switch timeout",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    155: "NVLink software-defined error",
    156: "resource retirement",
    158: "GPU fatal timeout",
}
_WATCHED = {
    63: "memory row remapped",
    92: "high rate of single-bit ECC errors",
    94: "contained memory error",
    121: "corrected C2C errors",
    154: "recovery action changed",
    157: "resource retirement failed",
    **dict.fromkeys(range(144, 151), "NVLink 5 error"),
}
_OF_APPLICATIONS = {
    **dict.fromkeys((8, 11, 13, 25, 31, 32, 37, 38, 39, 40, 41, 43, 44, 45, 60, 66, 67, 68, 69), "application fault"),
    **dict.fromkeys((70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 137, 139, 141), "application fault"),
    **dict.fromkeys((*range(96, 106), *range(126, 136)), "application fault"),
    **dict.fromkeys((14, 93, 106, 107, 108, 152, 153, 160, 161), "informational"),
}
XIDS: dict[int, XidMeaning] = {
    79: XidMeaning(Severity.FATAL, Action.REBOOT, "GPU has fallen off the bus"),
    54: XidMeaning(Severity.LEAVE, Action.REPLACE, "auxiliary power is not connected"),
    151: XidMeaning(Severity.LEAVE, Action.REBOOT, "key rotation error"),
    **{number: XidMeaning(Severity.LEAVE, Action.RESET, name) for number, name in _RESET.items()},
    **{number: XidMeaning(Severity.SUSPECT, Action.NONE, name) for number, name in _WATCHED.items()},
    **{number: XidMeaning(Severity.OK, Action.NONE, name) for number, name in _OF_APPLICATIONS.items()},
}
UNKNOWN = XidMeaning(Severity.SUSPECT, Action.NONE, "not in the table")
FALLEN_OFF = 79


def meaning(number: int) -> XidMeaning:
    """The meaning of an Xid; `UNKNOWN` if it is not in the table."""
    return XIDS.get(number, UNKNOWN)
