"""Sums of a step's gradients, and the handling of data-parallel wrappers around them."""
