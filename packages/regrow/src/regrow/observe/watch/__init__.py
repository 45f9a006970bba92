"""A running job over HTTP, for reading: Prometheus metrics and a live page. It never waits for, nor harms, the job."""
