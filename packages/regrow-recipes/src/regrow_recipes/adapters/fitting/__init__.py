"""Lightning's fit under regrow: an epoch loop whose updates are steps, its book, and callbacks that are called once."""
