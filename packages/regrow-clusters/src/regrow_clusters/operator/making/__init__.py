"""Makes and ends a job's objects: its pods, what they need to find each other, its disruption budget.

The controller decides; here it is done, and a refusal gets its cure (`refusals.py`, pure).
"""
