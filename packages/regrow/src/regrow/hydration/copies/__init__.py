"""A copy of one rank's state in shared memory: how it is made, described and read back."""
