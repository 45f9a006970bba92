"""Places of a job's pods in the network, and the order of the job's nodes that follows from them.

Pods cannot read the labels of their node, and get their nodes only after they were created. So each pod of a gang first
waits for its place: annotations, which it reads as files (`waiting.py`). `node_ranks.py`, pure, decides the order.
"""
