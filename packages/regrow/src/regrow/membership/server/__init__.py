"""The coordinator's I/O: agents over WebSockets, people over HTTP. Decides nothing itself."""
