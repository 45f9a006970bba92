"""The shadow proof: whether a newcomer in a rank's place computes bitwise the same as the rank, and if not, why."""
