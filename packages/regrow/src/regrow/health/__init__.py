"""Whether a node is fit to train on: probes that read, pure rules that judge, and the user's own checks.

Probes run in child processes with deadlines (`run.py`), so that one that hangs or crashes costs nothing and is told as
what it is. What cannot be read is no fault. Nothing here mends anything.
"""
