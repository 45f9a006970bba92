"""Sums of a step's gradients, and the care that data-parallel wrappers need for them."""
