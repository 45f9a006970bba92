"""Owner of durable checkpoints: the identity of a training, which a run that goes on from them adopts."""

import msgspec


class Lineage(msgspec.Struct, frozen=True):
    """A training over all its runs. It is in the manifest of each of its checkpoints.

    `id`: random, made by the first run; empty: of a version that wrote none. `job`: the name of that run, `started`:
    when it did, in seconds since the epoch. `adopted`: ids whose checkpoints count as this training's too.
    """

    id: str = ""
    job: str = ""
    started: float = 0.0
    adopted: tuple[str, ...] = ()

    def owns(self, other: str) -> bool:
        """True if an object with that id is this training's: it may go back to it, and remove it."""
        return other == self.id or other in self.adopted


NOBODY = Lineage()
"""Of no training that is known."""
