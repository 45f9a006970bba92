"""The training that owns durable checkpoints, whose identity a run adopts when it resumes from them."""

import msgspec


class Lineage(msgspec.Struct, frozen=True):
    """A training over all its runs. It is stored in the manifest of each of its checkpoints.

    `id`: random, made by the first run; empty: written by a version without lineages. `job`: name of the first run,
    `started`: its start, in seconds since the epoch. `adopted`: ids whose checkpoints count as this training's too.
    """

    id: str = ""
    job: str = ""
    started: float = 0.0
    adopted: tuple[str, ...] = ()

    def owns(self, other: str) -> bool:
        """True if this training owns a checkpoint with the id `other`: it may resume from it and remove it."""
        return other == self.id or other in self.adopted


NOBODY = Lineage()
"""The lineage of no known training."""
