"""Proofs that newcomers could take the place of a rank: their choice and their schedule."""
