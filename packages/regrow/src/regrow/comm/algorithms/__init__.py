"""Algorithms of collectives: the partners and the order of addition, by size of group and of tensor."""
