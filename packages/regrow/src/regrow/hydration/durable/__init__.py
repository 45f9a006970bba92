"""State on disk, in the format of `torch.distributed.checkpoint`: the last resort."""
