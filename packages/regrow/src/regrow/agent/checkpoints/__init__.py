"""Durable checkpoints on a node: the writer process, and the agent's side of it."""
