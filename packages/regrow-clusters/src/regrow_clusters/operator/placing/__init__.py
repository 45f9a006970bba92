"""Places of a job's pods in the network, and the order of the job's nodes that follows from them.

Pods cannot read the labels of their node, and get their nodes only after they were made. So each one of a gang waits,
before it begins, for its place: in annotations, which it reads as files (`waiting.py`). `node_ranks.py` decides, pure.
"""
