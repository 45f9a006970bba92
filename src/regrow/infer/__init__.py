"""After training: what teams run in the idle capacity of a training cluster.

* `lz` ends degenerate repetition: a penalty on what the text so far makes cheap to say again, and the detector of
  outputs that went round in circles.
* `batch` runs a file of requests over a pool of workers that comes and goes.

Nothing is imported here, torch least of all: the control plane starts without it, and reads of this room only what
runs without it (the batch head, the detector). Both rooms know nothing of a training; a pool that lives in the capacity
of an elastic job is told by it, not the other way round.
"""
