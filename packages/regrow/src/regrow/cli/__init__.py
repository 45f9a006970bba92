"""The command tree: each command parses its arguments, imports and calls one function, and prints the result."""

from regrow.cli.tree import main

__all__ = ["main"]
