"""Negotiation of one-sided reads between holder and newcomer, by `--hydration`: `sockets`, `memory` or `nixl`."""

import socket
import threading
from collections.abc import Callable

from regrow.core.errors import RegrowError
from regrow.hydration import nixl_reads
from regrow.hydration.direct import MEMORY, NIXL, DirectReads, MemoryReads, pid_of_holder
from regrow.hydration.inventory import Inventory, StateSource
from regrow.hydration.messages import Direct

SOCKETS = "sockets"


def lacks(choice: str) -> str:
    """Reason why this node cannot do the reads that `--hydration` requests; empty if it can."""
    why = nixl_reads.missing() if choice == NIXL else ""
    return f"{NIXL} is {why}" if why else ""


def exposed(
    wanted: list[str], choice: str, source: StateSource, inventory: Inventory
) -> tuple[Direct, Callable[[], None]]:
    """A holder's answer to a newcomer that can do the reads in `wanted`, and a function that ends their exposure."""
    if MEMORY in wanted and choice == MEMORY:
        return Direct(MEMORY), _nothing
    if NIXL in wanted and choice == NIXL:
        try:
            exposure = nixl_reads.NixlExposure(source.tensor(each.name) for each in inventory.entries if each.nbytes)
        except RegrowError as error:
            return Direct(why=f"the holder cannot: {error}"), _nothing
        return Direct(NIXL, exposure.passport), exposure.close
    return Direct(why="the holder is not configured for it" if wanted else ""), _nothing


def _nothing() -> None: ...


class ReadsOfNewcomer:
    """All one-sided reads of one reception of state.

    Args:
        choice: value of `--hydration`.
    """

    def __init__(self, choice: str) -> None:
        self._choice, self._lacks = choice, lacks(choice)
        self._lock = threading.Lock()
        self._nixl: nixl_reads.NixlReader | None = None

    def wanted(self, endpoint: str) -> list[str]:
        """Kinds of reads to request from the holder at this endpoint."""
        if self._choice == NIXL:
            return [] if self._lacks else [NIXL]
        return [MEMORY] if self._choice == MEMORY and endpoint.startswith("unix:") else []

    def of(self, sock: socket.socket, direct: Direct) -> tuple[DirectReads | None, str]:
        """Reads for a connection to a holder that gave this answer; or None, and the reason if reads were requested."""
        why = self._lacks or direct.why
        if direct.kind == MEMORY and self._choice == MEMORY and (pid := pid_of_holder(sock)):
            return MemoryReads(pid), ""
        if direct.kind == NIXL == self._choice:
            try:
                with self._lock:
                    self._nixl = self._nixl or nixl_reads.NixlReader()
                return self._nixl.reads(direct.passport, sock), ""
            except RegrowError as error:
                why = str(error)
        return None, f"{self._choice}: {why}" if why else ""

    def close(self) -> None:
        """End all reads; afterwards no connection may read."""
        with self._lock:
            nixl, self._nixl = self._nixl, None
        if nixl is not None:
            nixl.close()
