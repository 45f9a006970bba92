"""The workers of a node: forked from a zygote, watched, spoken to over a channel, fenced, reaped."""
