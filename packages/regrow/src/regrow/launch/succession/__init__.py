"""Launchers of nodes without the coordinator: they follow it, and elect another if it is lost."""
