"""Pods of an Indexed Job as nodes of a job: manifests, and what runs in each pod."""
