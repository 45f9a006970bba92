"""How a job gets and gives back its machines, wherever they come from: one planner for all. Pure.

An adapter observes its cluster (`observed.py`), asks `planner.plan` what is to be done (`actions.py`), does it, and
observes again. The planner keeps nothing between two calls: what it must know of the past is in what is observed.
"""
