"""Accelerators by torch's generic interface: which one this process uses, and what every kind of it can do."""
