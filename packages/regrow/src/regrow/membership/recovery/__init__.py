"""Recovery from a fault: from the loss of a worker to the next generation."""
