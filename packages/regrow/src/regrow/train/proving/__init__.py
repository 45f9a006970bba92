"""The shadow proof: does a newcomer in a rank's place compute the same as the rank, bit for bit, and if not, why."""
