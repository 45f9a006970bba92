"""One agent's part of the job's key-value store: its own keys, cached ones, and the routes to all others."""
