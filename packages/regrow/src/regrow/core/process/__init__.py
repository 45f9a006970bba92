"""This process: its tasks, its forks, its standard streams, and limits of the kernel."""
