"""The receipt: compares a disturbed run with the same run undisturbed."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from regrow.observe.ledger import Ledger
from regrow.observe.live import incident_table
from regrow.observe.story import seconds


def differences(one: Ledger, other: Ledger) -> list[str]:
    """A sentence about every committed number in which two jobs differ, in order of steps. Compares bit by bit."""
    mine, theirs = one.numbers, other.numbers
    found = []
    for step, rank in sorted(mine.keys() | theirs.keys()):
        place = f"step {step}, rank {rank}"
        a, b = mine.get((step, rank)), theirs.get((step, rank))
        if a is None or b is None:
            found.append(f"{place}: committed in only one of the runs")
        else:
            found.extend(f"{place}: {name} is {x} and {y}" for name, x, y in _unequal(a, b))
    return found


def _unequal(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[str, str, str]]:
    return [
        (name, repr(a.get(name)), repr(b.get(name)))
        for name in sorted(a.keys() | b.keys())
        if name not in a or name not in b or struct.pack("<d", a[name]) != struct.pack("<d", b[name])
    ]


@dataclass(frozen=True)
class Receipt:
    """Compares a disturbed run with the undisturbed one.

    Args:
        disturbed, alone: the ledgers of the disturbed and the undisturbed run.
        digest, digest_alone: digest of the final state of each, written by the script; None if it wrote none.
        planned: number of faults in the plan.
    """

    disturbed: Ledger
    alone: Ledger
    digest: str | None
    digest_alone: str | None
    planned: int

    @property
    def state_equal(self) -> bool:
        """True if both runs ended with the same final state."""
        return self.digest is not None and self.digest == self.digest_alone

    @property
    def bitwise_equal(self) -> bool:
        """True if the final state and every committed number of every rank, at least one, are equal."""
        return self.state_equal and self._losses_equal()

    @property
    def recovered(self) -> bool:
        """True if all planned faults were injected, and every incident ended in a committed step."""
        ledger = self.disturbed
        ended = ledger.ended is not None and ledger.ended.code == 0
        mended = sum(incident.faults for incident in ledger.incidents)
        return ended and len(ledger.injected) >= self.planned <= mended and not ledger.open_incidents

    @property
    def steps_lost(self) -> int:
        """Number of committed steps lost, by incidents or by commits, whichever is larger."""
        return max(self.disturbed.steps_lost, self.disturbed.steps_redone)

    def figures(self) -> dict[str, float]:
        """The figures for `--json`. Without an incident there is no median."""
        median = self.disturbed.recovery_median
        return {
            "bitwise_equal": float(self.bitwise_equal),
            "steps_lost": float(self.steps_lost),
            "faults": float(len(self.disturbed.injected)),
            "goodput": self.disturbed.goodput,
        } | ({} if median is None else {"recovery_median_s": median})

    def print(self, console: Console) -> None:
        """Print the receipt."""
        title = Text("incidents of the disturbed run", style="bold")
        console.print(Group(title, incident_table(self.disturbed.incidents)))
        console.print(self._sums())
        for line in differences(self.disturbed, self.alone)[:5]:
            console.print(f"  differs: {line}", markup=False, highlight=False)

    def _sums(self) -> RenderableType:
        ledger, alone = self.disturbed, self.alone
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim")
        table.add_column()
        median = ledger.recovery_median
        mended = "all mended" if self.recovered else "NOT all mended"
        table.add_row("faults", f"{len(ledger.injected)} of {self.planned} struck; {mended}")
        table.add_row("time to mend", f"{seconds(median)} median, the step run again included" if median else "–")
        table.add_row("median step", "–" if ledger.step_median is None else seconds(ledger.step_median))
        table.add_row("committed steps lost", str(self.steps_lost))
        for found in ledger.corruptions:
            table.add_row("silent corruption", f"rank {found.rank} before step {found.step}, on {found.node}")
        table.add_row("goodput", f"{ledger.goodput:.1%} disturbed, {alone.goodput:.1%} alone")
        table.add_row("time from first step to last", f"{seconds(ledger.wall)} disturbed, {seconds(alone.wall)} alone")
        table.add_row("committed losses", _verdict(self._losses_equal(), f"{len(alone.numbers)} compared"))
        digest = f"digest {self.digest_alone[:16]}…" if self.digest_alone else "no digest"
        table.add_row("final state", _verdict(self.state_equal, digest))
        equal = self.bitwise_equal
        table.add_row("bitwise equal", Text("yes" if equal else "NO", style="bold green" if equal else "bold red"))
        return table

    def _losses_equal(self) -> bool:
        return bool(self.alone.numbers) and not differences(self.disturbed, self.alone)


def _verdict(equal: bool, detail: str) -> Text:
    style = "green" if equal else "bold red"
    return Text.assemble(("identical" if equal else "DIFFERENT", style), f" ({detail})")
