"""Fitness of a node for training: probes that read, pure rules that judge, and the user's own checks.

Probes run in child processes with deadlines (`run.py`), so that one that hangs or crashes costs nothing and is reported
as such. A reading that is not available is no fault. Nothing here repairs anything.
"""
