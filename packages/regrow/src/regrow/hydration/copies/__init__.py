"""A copy of one rank's state in shared memory: taken, described, and read back."""
