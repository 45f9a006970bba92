"""Launchers of nodes without the coordinator: they follow it, and elect another where it is lost."""
