"""What objects around protected modules hold besides tensors of the state. Start with `hanging.py`."""
