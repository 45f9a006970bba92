"""A running job's decisions are taken over by another machine, from what the agents know. Pure."""
