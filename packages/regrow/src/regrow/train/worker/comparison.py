"""Compares digests of the replicas' state between two steps, so that silent corruption is found within a few steps."""

import logging
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import xxhash

from regrow.agent.workers.link import WorkerLink
from regrow.comm.groups import Groups
from regrow.core.errors import RegrowError, StateError
from regrow.core.ids import NO_STATE, Rank, StepNo
from regrow.core.messages import orders
from regrow.core.messages.replicas import CorruptionNamed, ReplicasDiffer
from regrow.core.phase import Phase
from regrow.hydration.inventory import Inventory
from regrow.step.replicas import Agree, Differ, Statement, judge
from regrow.train.state.fingerprints import (
    Block,
    Fingerprint,
    Suspect,
    blocks,
    digest_blocks,
    distance,
    fingerprint,
    keep,
)
from regrow.train.state.protected import ProtectedState
from regrow.train.state.verified import VerifiedCopy
from regrow.train.worker.control import Control

_WIRE = struct.Struct("<iQ16s???dI")
_MOST_NAMES = 8
_log = logging.getLogger("regrow")


class Comparison:
    """One worker's part in the comparison.

    Args:
        every: steps between two comparisons.
        own: called each time; returns names of protected tensors that each rank has for itself.
        builder: whether this worker built its first state, and did not receive it.
    """

    def __init__(
        self,
        link: WorkerLink,
        groups: Groups,
        control: Control,
        state: ProtectedState,
        *,
        every: int,
        own: Callable[[], Iterable[str]],
        builder: bool,
    ) -> None:
        self._link, self._groups, self._control, self._state = link, groups, control, state
        self._every, self._own = every, own
        self._copy = VerifiedCopy(state)
        self._witness = builder
        self._distrusted = False
        self._suspects: _Kept | None = None
        self._holding = ""
        self._replicated = False

    # --- joining a generation ----------------------------------------------------------------------------------

    def join(self, form: orders.FormGeneration) -> None:
        """Learn from a new membership which ranks are replicas of each other."""
        holdings = [member.holding for member in form.members]
        self._holding = next(member.holding for member in form.members if member.rank == form.rank)
        self._replicated = len(set(holdings)) < len(holdings)

    def go_back(self, form: orders.FormGeneration) -> None:
        """Go back to the state that all replicas agreed on, unless this worker has it already.

        Raises `StateError` if there is no such copy, `GenerationHalted` if the membership is given up.
        """
        if self._control.state_at == form.step and not self._distrusted:
            return
        if self._copy.step != form.step:
            raise StateError(f"this worker should go back to state@{form.step}, of which it has no verified copy")
        try:
            self._copy.check()
        finally:
            self._control.verified = self._copy.step
        self._control.replace(form.generation)
        try:
            self._copy.restore()
        except BaseException:
            self._control.fail()
            raise
        self._control.replaced(form.step)
        self._distrusted, self._witness = False, True

    def received(self) -> None:
        """Note that the state was received from others."""
        self._distrusted = self._witness = False

    # --- comparing ---------------------------------------------------------------------------------------------

    def compare(self, step: StepNo, *, last: bool) -> bool:
        """Compare before `step`, or after the last one; True if all replicas have the same state, or none is due.

        False if they differ, the coordinator was informed, and its verdict must be awaited. This is a collective, and
        raises what collectives raise.
        """
        if not self._replicated or not (last or step % self._every == 0):
            return True
        self._link.board.enter(Phase.DATA, step=step, generation=self._control.generation)
        mine = _Look.at(self._state, frozenset(self._own()))
        far = None
        if self._suspects is not None and self._suspects.step == step:
            far = distance(self._suspects.blocks, mine.tensors)
        statements, most = self._exchange(mine, far)
        match judge(statements):
            case Differ() as verdict:
                self._differ(step, verdict, statements, mine, most)
                return False
            case Agree(wrong=wrong):
                self._agree(step, wrong)
        if self._copy.step != step:
            self._control.verified = NO_STATE
            self._copy.take(step, mine.digest.tensors, mine.left_out)
            self._control.verified = step
        return True

    def _exchange(self, mine: "_Look", far: float | None) -> tuple[list[Statement], int]:
        """Exchange statements with all ranks; also returns the largest number of blocks that one of them has."""
        env = self._link.env
        holding = xxhash.xxh3_64_intdigest(self._holding.encode())
        count = len(blocks(mine.inventory, mine.left_out))
        was = self._suspects is not None and self._suspects.witness
        words = _WIRE.pack(env.rank, holding, mine.digest.whole, self._witness, was, far is not None, far or 0.0, count)
        received = self._groups.gather(torch.frombuffer(bytearray(words), dtype=torch.uint8))
        said = [_WIRE.unpack(bytes(each.tolist())) for each in received]
        statements = [
            Statement(Rank(rank), whose, what, witness, distance if known else None, was)
            for rank, whose, what, witness, was, known, distance, _ in said
        ]
        return statements, max(each[-1] for each in said)

    def _agree(self, step: StepNo, wrong: tuple[Rank, ...]) -> None:
        if wrong:
            env = self._link.env
            self._link.send(CorruptionNamed(env.worker, self._control.generation, step, list(wrong)))
        if self._suspects is not None and self._suspects.step <= step:
            self._suspects = None
        self._witness, self._distrusted = True, False

    def _differ(self, step: StepNo, verdict: Differ, statements: list[Statement], mine: "_Look", most: int) -> None:
        self._distrusted = True
        env, differing = self._link.env, list[Block]()
        try:
            differing = self._find(statements, mine, most)
            if verdict.undecided:
                self._suspects = _Kept(step, self._witness, keep(differing, mine.tensors))
            # The report below ends the groups: first let all ranks receive what they need.
            self._groups.vote()
        except (RuntimeError, RegrowError, OSError) as error:
            # Collectives raise if a rank has failed, or has sent its report already: then the generation is over.
            if not self._control.halted:
                _log.warning("it could not be found out where the replicas differ at step %d: %s", step, error)
        names = list(dict.fromkeys(block.name for block in differing))[:_MOST_NAMES]
        wrong, undecided = list(verdict.wrong), list(verdict.undecided)
        self._link.send(ReplicasDiffer(env.worker, self._control.generation, step, wrong, undecided, names))
        self._control.fail()

    def _find(self, statements: list[Statement], mine: "_Look", most: int) -> list[Block]:
        """The blocks in which this rank and its replicas differ. This is a collective of all ranks."""
        digests = list(digest_blocks(mine.inventory, mine.tensors, mine.left_out))
        rows = self._groups.gather(torch.tensor(digests + [0] * (most - len(digests)), dtype=torch.int64))
        holding = next(each.holding for each in statements if each.rank == self._link.env.rank)
        replicas = torch.stack([rows[at] for at, each in enumerate(statements) if each.holding == holding])
        unequal = (replicas != replicas[0]).any(dim=0).tolist()
        return [
            block for block, differs in zip(blocks(mine.inventory, mine.left_out), unequal, strict=False) if differs
        ]


class _Kept(NamedTuple):
    """This rank's blocks in which replicas differed before `step`, kept until the steps are run again."""

    step: StepNo
    witness: bool
    blocks: list[Suspect]


class _Look(NamedTuple):
    """This rank's state in the form in which it is compared."""

    inventory: Inventory
    tensors: dict[str, torch.Tensor]
    left_out: frozenset[str]
    digest: Fingerprint

    @classmethod
    def at(cls, state: ProtectedState, left_out: frozenset[str]) -> "_Look":
        inventory, tensors = state.canonical()
        return cls(inventory, tensors, left_out, fingerprint(inventory, tensors, left_out))
