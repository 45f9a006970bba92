"""Functions of a script that are called when the world or its groups change, or that request external results."""
