"""How the gradients of a step are summed, and what data-parallel wrappers need for it."""
