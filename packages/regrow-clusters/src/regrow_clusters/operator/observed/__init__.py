"""View of a job in the cluster for the planner: its pods, its replicas, its nodes.

It reads `cache.py` and the job's coordinator; it decides nothing and writes nothing.
"""
