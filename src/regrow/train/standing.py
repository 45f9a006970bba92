"""Where a worker stands in its job, as its script may ask, and what a policy makes of that."""

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from regrow.comm import meshes
from regrow.core.errors import UsageError
from regrow.step.policy import Policy
from regrow.train.alone import Alone
from regrow.train.batches import Batches
from regrow.train.member import Member
from regrow.train.microbatches import Dealer
from regrow.train.policy import Scaled
from regrow.train.protect import ProtectedState
from regrow.train.sharing import Share, share_of
from regrow.train.worlds import Hooks, ScaleEvent


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
        self._data_of: DeviceMesh | Share | None = None
        """What the script says of the share of the data that this rank reads."""
        self._hooks = Hooks()
        self._objects: list[object] = []
        """What the script protects."""
        self._stood = (self.rank, self.world_size)
        """The rank and the world that device meshes are of."""

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
        if self._dealer is None and self._member.unit > 1:
            return self.world_size // self._member.unit
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

    def on_scale(self, hook: Callable[[ScaleEvent], None]) -> None:
        """Call `hook(event)` whenever the world has changed its size, on every rank, at the same step boundary.

        It runs when the new world stands and newcomers have their state, before the next step. Who leaves hears of it
        too (`event.leaving`). A hook calls no collectives. Ordinary steps cost nothing for it.
        """
        self._hooks.add(hook)

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

    def _fixed(self) -> str:
        """Why the world can have no other size, as far as its data goes; empty: it can."""
        dealer, unit = self._dealer, self._member.unit
        if isinstance(self._data_of, tuple):
            return f"session.steps was given data={self._data_of}, which is for one world only"
        if dealer is None and self._data().order.global_batch == 0:
            return (
                "the global batch would follow the number of ranks "
                "(give session.steps microbatches=, or make a regrow.DataLoader with global_batch_size=)"
            )
        if dealer is not None and self.replicas * unit != self.world_size:
            return (
                f"{self.world_size} ranks are {self.replicas} replicas of this model, but the job was started with "
                f"--replica-ranks {unit}"
            )
        return meshes.refusal(self._objects, unit=unit, world=self.world_size)

    def _follow_world(self) -> None:
        """The world may have another size: bring along what knows ranks, and read this rank's share of the data."""
        before, self._stood = self._stood, (self.rank, self.world_size)
        if before != self._stood:
            meshes.resize(
                self._objects, unit=self._member.unit, before=before[1], world=self.world_size, rank=self.rank
            )
            self._share = share_of(self._data_of)

    def _protected(self) -> ProtectedState:
        if self._state is None:
            raise UsageError("nothing is protected", hint="call session.protect(model, optimizer, ...) before steps()")
        return self._state

    def _data(self) -> Batches:
        if self._batches is None:
            raise UsageError("no loader yet", hint="call session.steps(loader, until=...)")
        return self._batches
