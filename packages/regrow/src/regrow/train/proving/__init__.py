"""The shadow proof: whether a newcomer in a rank's place computes what the rank does, bit for bit, or why not."""
