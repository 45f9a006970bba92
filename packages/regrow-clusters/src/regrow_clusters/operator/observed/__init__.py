"""View of a job in the cluster for the planner: its pods, its replicas, its nodes.

Reads what `cache.py` and the job's coordinator have; decides nothing and writes nothing.
"""
