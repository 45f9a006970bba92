"""Takeover of a running job's decisions by another machine, from the agents' knowledge. Pure."""
