"""Algorithms of collectives: who speaks to whom, in what order they add, by size of group and of tensor."""
