"""Runs of habits: what they leave, how two are compared, and those without regrow."""

import math
import os
import select
from pathlib import Path
from typing import Any

import torch
from tests.harm.table import Habit, named
from tests.process.launching import SOURCE, warm

from regrow.observe.ledger import Ledger

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATIENCE_S = 300.0
CLOSE = 2e-4
"""Relative: what another order of summation does in a few steps."""
IMPORTS = ("torch.distributed.optim", "torch._dynamo")
"""Imports of habits: a second for each worker, otherwise."""


def imports_of(habit: Habit) -> tuple[str, ...]:
    """Imports of the process from which a habit's are forked."""
    return habit.imports or IMPORTS


class Run:
    """One run of a habit: exit code, what it said, every committed number, what each rank called its result."""

    def __init__(self, folder: Path, code: int, output: str, ledger: Ledger | None = None) -> None:
        self.folder, self.code, self.output, self.ledger = folder, code, output, ledger
        self.finals: dict[int, Any] = {}
        for path in sorted(folder.glob("final.*.pt")):
            self.finals[int(path.suffixes[-2][1:])] = torch.load(path, weights_only=False)

    @property
    def numbers(self) -> dict[tuple[int, int, str], float]:
        """(step, rank, name) to what was logged."""
        if self.ledger is not None:
            return {
                (step, rank, name): value
                for (step, rank), metrics in self.ledger.numbers.items()
                for name, value in metrics.items()
            }
        return {(step, rank, name): value for rank, final in self.finals.items() for step, name, value in final["logs"]}

    @property
    def kills(self) -> list[tuple[int, int]]:
        """(step, rank) of whoever was killed."""
        mine = (path.name.split("-")[2:] for path in self.folder.glob("struck-*"))
        injected = self.ledger.injected if self.ledger is not None else []
        return [*((int(step), int(rank)) for rank, step in mine), *((f.step, f.rank or 0) for f in injected)]

    @property
    def results(self) -> dict[tuple[int, str], Any]:
        """(rank, path) to a leaf of the result."""
        return {(rank, path): leaf for rank, final in self.finals.items() for path, leaf in final["kept"].items()}


class Referee:
    """A process that has imported what habits import, and runs them without regrow, and alone."""

    def __init__(self, folder: Path, imports: tuple[str, ...]) -> None:
        path = os.pathsep.join([SOURCE, str(ROOT)])
        env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        (asked, self._asks), (self._answers, answers) = os.pipe(), os.pipe()
        words, streams = [str(folder)], (asked, answers, 2)
        self._process = warm(imports).start("tests.harm.reference", words, cwd=str(ROOT), env=env, streams=streams)
        os.close(asked)
        os.close(answers)

    def run(self, kind: str, name: str) -> None:
        """Have a habit run."""
        os.write(self._asks, f"{kind} {name}\n".encode())
        ready, _, _ = select.select([self._answers], [], [], PATIENCE_S)
        assert ready and os.read(self._answers, 1 << 10).decode().split() == [kind, name], "no answer"

    def close(self) -> None:
        """End the process."""
        os.close(self._asks)
        self._process.wait(PATIENCE_S)
        os.close(self._answers)


class References:
    """Runs of plain torch and of plain python, each habit's made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._referees: dict[tuple[str, ...], Referee] = {}

    def of(self, kind: str, name: str) -> Run:
        """`plain`, `single`, `alone` or `still`. Fails where that run did."""
        folder = self._folder / kind / name
        if not folder.exists():
            imports = imports_of(named(name))
            if imports not in self._referees:
                self._referees[imports] = Referee(self._folder, imports)
            self._referees[imports].run(kind, name)
        said = "\n".join(path.read_text() for path in folder.glob("log.*"))
        assert (folder / "ok").exists(), f"the reference itself fails ({kind}): {said}"
        return Run(folder, 0, said)

    def close(self) -> None:
        """End the processes."""
        for referee in self._referees.values():
            referee.close()


def near(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and a.is_floating_point():
        return torch.allclose(a, b, rtol=CLOSE, atol=CLOSE / 10)
    if isinstance(a, float):
        return math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE / 10)
    return same(a, b)


def same(a: Any, b: Any) -> bool:
    """Bit by bit."""
    if type(a) is not type(b):
        return False
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)
