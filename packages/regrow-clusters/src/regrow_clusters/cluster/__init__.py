"""Machines of a job, taken and given back wherever they come from: one planner for all. Pure.

An adapter observes its cluster (`observed.py`), asks `planner.plan` for the actions (`actions.py`), does them, and
observes again. The planner keeps nothing between two calls: the past that it needs is in the observations.
"""
