"""Changes of the world's size while the training runs."""
