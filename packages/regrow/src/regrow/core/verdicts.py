"""Verdicts on a node's health: one type for the job's records, `regrow doctor` and the clusters that read them."""

from enum import StrEnum

import msgspec

from regrow.core.ids import NodeId


class Severity(StrEnum):
    """Severity of a finding, from the mildest to the worst."""

    OK = "ok"
    SUSPECT = "suspect"
    """Not as it should be, or not certain. It is reported, but has no consequence by itself."""
    LEAVE = "leave"
    """Work here may fail or be wrong: move workers to another node that has room."""
    FATAL = "fatal"
    """Nothing can run here."""

    @property
    def failed(self) -> bool:
        """True if the node has failed the check."""
        return self in (Severity.LEAVE, Severity.FATAL)


class Action(StrEnum):
    """Action that would repair the node. regrow never takes it; the cluster or a person does."""

    NONE = "none"
    RESET = "reset"
    """Reset the device."""
    REBOOT = "reboot"
    """Reboot the node."""
    REPLACE = "replace"
    """Replace the hardware."""


_RANKS = list(Severity)


class HealthVerdict(msgspec.Struct, frozen=True):
    """Finding of one check on a node.

    `device`: the part of the node (`gpu0`, `cpu`, a folder, a peer's address); empty: the node as a whole. `source`:
    name of the check, `check:NAME` for one of the user's checks. `evidence`: the readings, for people.
    """

    node: NodeId
    device: str
    severity: Severity
    action: Action
    source: str
    evidence: str

    @property
    def text(self) -> str:
        """The verdict in one line, without the node's name."""
        device = f" {self.device}" if self.device else ""
        action = f" ({self.action})" if self.action is not Action.NONE else ""
        return f"{self.severity}: {self.source}{device}: {self.evidence}{action}"


def worst(severities: "list[Severity]") -> Severity:
    """The worst severity; `ok` for an empty list."""
    return max(severities, key=_RANKS.index, default=Severity.OK)
