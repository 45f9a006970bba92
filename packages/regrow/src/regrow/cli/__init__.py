"""The command tree: parses words, calls one function, prints the result. What a command needs is imported in it."""

from regrow.cli.tree import main

__all__ = ["main"]
