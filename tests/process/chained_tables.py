"""`python -m tests.process.chained_tables`: regrow, with a coordinator whose tables each node gets from the one before.

It prints which node is told what about them.
"""

import sys

import regrow.membership.tables as tables
from regrow.cli import main
from regrow.core.ids import NodeId
from regrow.membership.server.coordinator import Coordinator

_order = Coordinator._order


def _noted(self: Coordinator, node: NodeId, what: object) -> None:
    if type(what).__name__ in ("KeepTable", "ChangeTable", "FetchTable"):
        sys.stdout.write(f"table {node} {type(what).__name__}\n")
        sys.stdout.flush()
    _order(self, node, what)  # type: ignore[arg-type]  # whatever it is


if __name__ == "__main__":
    tables.DIRECT, tables.WIDTH = 0, 1
    Coordinator._order = _noted  # type: ignore[method-assign, assignment]
    sys.exit(main())
