"""Incidents as OpenTelemetry's traces, an extra: `incidents` makes spans of records, `export` sends them."""
