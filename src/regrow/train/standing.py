"""Where a worker stands in its job, as its script may ask, and what a policy makes of that."""

from typing import Any

from regrow.core.errors import UsageError
from regrow.step.policy import Policy
from regrow.train.alone import Alone
from regrow.train.batches import Batches
from regrow.train.member import Member
from regrow.train.microbatches import Dealer
from regrow.train.policy import Scaled
from regrow.train.protect import ProtectedState
from regrow.train.sharing import Share


class Standing:
    """The part of a session that decides nothing about steps.

    Args:
        member: how this process takes part in a job; `Alone` outside one.
    """

    def __init__(self, member: Member | Alone) -> None:
        self._member = member
        self._state: ProtectedState | None = None
        self._share: Share | None = None
        self._batches: Batches | None = None
        self._scaled: Scaled | None = None

    @property
    def rank(self) -> int:
        """This worker's rank now. A standby takes its final rank only when it is needed: ask, do not remember."""
        return self._member.rank

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return self._member.local_rank

    @property
    def world_size(self) -> int:
        """Ranks in the world."""
        return self._member.world

    @property
    def replicas(self) -> int:
        """Replicas in the world: groups of ranks that hold one full copy of the state and read one share of the data.

        Ranks that together make one replica are known from `steps` on; before it, each counts as one.
        """
        return self._place()[1] // (self._dealer.unit if self._dealer is not None else 1)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def generation(self) -> int:
        """The membership that this worker runs in."""
        return self._member.generation

    def policy(self, policy: Policy) -> None:
        """What changes with the number of replicas: the learning rate at each update, and the values of `setting`.

        Raises:
            UsageError: nothing is protected yet, or there is a policy already.
        """
        if self._scaled is not None:
            raise UsageError("policy() was called a second time", hint="put everything into one policy")
        self._scaled = Scaled(policy, self._protected().optimizers(), lambda: self.replicas)

    def setting(self, name: str) -> Any:
        """A named value of the policy for the present number of replicas: ask in every step. Raises `UsageError`."""
        if self._scaled is None:
            raise UsageError(f"there is no policy to have a setting {name!r}", hint="call session.policy(...)")
        return self._scaled.setting(name)

    @property
    def _dealer(self) -> Dealer | None:
        return self._batches.dealer if self._batches is not None else None

    def _place(self) -> Share:
        """Which share of the global batch is read here, of how many."""
        return self._share or (self.rank, self.world_size)

    def _protected(self) -> ProtectedState:
        if self._state is None:
            raise UsageError("nothing is protected", hint="call session.protect(model, optimizer, ...) before steps()")
        return self._state

    def _data(self) -> Batches:
        if self._batches is None:
            raise UsageError("no loader yet", hint="call session.steps(loader, until=...)")
        return self._batches
