"""Algorithms of collectives: the partners and the order of addition, by the size of the group and of the tensor."""
