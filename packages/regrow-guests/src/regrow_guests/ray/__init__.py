"""Actors of Ray as nodes of a job: `train(RayJob(...))` in the driver of a Ray job.

Only `train` imports `ray`. Ray's transport pickles the arguments of actors' methods, as for every actor.
"""

from regrow_guests.ray.driver import TrainingFailed, train
from regrow_guests.ray.job import NodeNews, RayJob

__all__ = ["NodeNews", "RayJob", "TrainingFailed", "train"]
