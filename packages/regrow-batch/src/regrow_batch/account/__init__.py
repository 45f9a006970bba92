"""A batch in numbers: `prices` has what it costs, `metrics` has what Prometheus is told while it runs. Pure."""
