"""Actors of Ray as nodes of a job: `train(RayJob(...))` in the driver of a Ray job.

`ray` is imported by `train` alone. Its own transport pickles what actors are told, as it does for every actor.
"""

from regrow_guests.ray.driver import TrainingFailed, train
from regrow_guests.ray.job import NodeNews, RayJob

__all__ = ["NodeNews", "RayJob", "TrainingFailed", "train"]
