"""Incidents as OpenTelemetry traces, an optional extra: `incidents` converts records to spans, `export` sends them."""
