"""Figures of a batch: `prices` computes its cost, `metrics` makes the series for Prometheus. Pure."""
