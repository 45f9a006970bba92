"""Takeover of a running job by another coordinator, from the agents' knowledge. Pure."""
