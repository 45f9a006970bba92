"""The coordinator's I/O: agents over WebSockets, people over HTTP. This package makes no decisions."""
