"""Copies of workers' state in the agent's shared memory, streamed to the buddy node's agent."""
