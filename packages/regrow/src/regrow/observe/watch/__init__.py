"""Serves a running job over HTTP: Prometheus metrics and a live page. It never blocks or fails the job."""
