"""Accelerators by torch's generic interface: the accelerator that this process uses, and functions for every kind."""
