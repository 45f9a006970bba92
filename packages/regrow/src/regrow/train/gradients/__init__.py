"""Sums of a step's gradients, and what data-parallel wrappers need for them."""
