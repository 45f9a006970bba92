"""A batch in numbers: `prices` what it costs, `metrics` what Prometheus is told while it runs. Pure."""
