"""One planner that requests and releases the machines of a job on any kind of cluster. Pure.

An adapter observes its cluster (`observed.py`), asks `planner.plan` for the actions (`actions.py`), does them, and
observes again. The planner keeps no state between two calls: the observations contain the history that it needs.
"""
