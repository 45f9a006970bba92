"""Proofs that a newcomer could take the place of a rank: the choice of newcomer and rank, and the schedule."""
