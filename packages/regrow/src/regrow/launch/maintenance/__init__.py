"""Maintenance of the nodes of a running job, from outside of it."""
