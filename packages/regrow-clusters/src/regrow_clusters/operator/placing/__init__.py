"""Where a job's pods are in the network, and which nodes of the job they are therefore.

Pods cannot read the labels of their node, and get their nodes only after they were made. So each one of a gang waits,
before it begins, until it is told: by annotations, which it reads as files (`waiting.py`). `seats.py` decides, pure.
"""
