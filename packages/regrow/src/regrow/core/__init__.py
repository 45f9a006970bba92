"""The vocabulary of the whole package: ids, messages, errors, configuration, time.

Imports nothing of the package and no torch, so that every other room may stand on it. `messages` is what processes of a
job say to one another: facts go up, orders go down. `records.py` is what is written down about a job.
"""
