"""Maintenance of a running job's nodes, from outside the job."""
