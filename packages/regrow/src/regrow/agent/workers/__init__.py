"""The workers of a node: forked from a zygote, watched, commanded over a channel, fenced, reaped."""
