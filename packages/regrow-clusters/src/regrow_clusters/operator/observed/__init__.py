"""What the cluster shows of a job: its pods, its replicas, its nodes, as the planner is told of them.

Reads what `cache.py` and the job's coordinator have; decides nothing and writes nothing.
"""
