"""Kubernetes: a controller for the resource `TrainingJob`. `cluster` makes the decisions that any cluster shares.

* Pure: the resource and its schema, the objects that a job needs, the reports of its pods, its status.
* I/O: `api.py` is the interface to an API server, `lightkube_api.py` implements it, `controller.py` watches and acts.

lightkube is imported in `lightkube_api.py` alone; it comes with `regrow-clusters[kubernetes]`.
"""
