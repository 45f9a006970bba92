"""The vocabulary of the whole package: ids, messages, errors, configuration, time.

Imports neither torch nor any other part of the package, so that every other package may import it. `messages` are sent
between the processes of a job: facts up, orders down. `records.py` defines the lines that a job writes to disk.
"""
