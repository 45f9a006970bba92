"""The machines of production under a virtual clock, with simulated agents, workers, network and faults.

Nothing here decides: `world.py` drives the same `membership.machine` that runs in production, `workers.py` behaves as
workers do, `invariants.py` says what must hold at every moment. Pure and seeded: a seed and a plan always give one run.
"""
