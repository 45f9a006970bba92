"""The machines of production under a virtual clock, with simulated agents, workers, network and faults.

This package makes no decisions: `world.py` drives the `membership.machine` of production, `workers.py` behaves like
real workers, `invariants.py` checks what must always hold. Pure and seeded: a seed and a plan always give the same run.
"""
