"""Fitness of a node for training: probes that read, pure rules that judge, and the user's own checks.

Probes run in child processes with deadlines (`run.py`), so that a probe that hangs or crashes does no harm and is
reported. An unavailable reading is not a fault. Nothing here repairs anything.
"""
