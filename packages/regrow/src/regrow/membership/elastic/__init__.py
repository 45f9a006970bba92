"""How the world comes to another size while the training runs."""
