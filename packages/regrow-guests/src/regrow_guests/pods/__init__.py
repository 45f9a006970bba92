"""Pods of an Indexed Job as nodes of a job: manifests, and the program of each pod."""
