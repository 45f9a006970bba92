"""Creates and deletes a job's objects: its pods, their service and secret, its disruption budget.

The controller decides; this package acts, and adds a cure to each refusal (`refusals.py`, pure).
"""
