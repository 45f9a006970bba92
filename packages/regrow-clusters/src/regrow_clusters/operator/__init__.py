"""Kubernetes runs jobs: a controller for the resource `TrainingJob`. What can be decided in `cluster` is.

* Pure: the resource and its schema, the objects that a job needs, what pods say of it, its status.
* I/O: `api.py` is all that is asked of an API server, `lightkube_api.py` asks it; `controller.py` watches and acts.

lightkube is imported in `lightkube_api.py` alone; it comes with `regrow-clusters[kubernetes]`.
"""
