"""What is done about a fault: from the loss of a worker to the next generation."""
