"""Accelerators by torch's generic interface: the one that this process uses, and functions that every kind has."""
