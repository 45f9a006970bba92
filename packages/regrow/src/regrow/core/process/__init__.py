"""The process that this is: its tasks, its forks, its standard streams, and what the kernel refuses it."""
