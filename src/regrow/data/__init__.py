"""Every sample once: which samples a step reads, and how they reach the step.

The global batch of step n is a function of (seed, n); each rank takes a slice of it. So there is no loader state to
save: `state@n` fixes the position, a retried step gets an identical batch, a newcomer starts at the step of the others.

* `order` decides (pure): the samples of a step, and a rank's slice of them.
* `seeding` makes everything random that a sample's code reads a function of integers.
* `loader` takes what a script gives to `session.steps` and answers `batch(step, rank, world)`;
  `sampling` with `mapstyle`, and `streams`, are the two ways there; `kept` gives a batch a second time.
"""
