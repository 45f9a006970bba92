"""Which rank speaks to which in a collective, and in what order it adds: by size of group and of tensor."""
