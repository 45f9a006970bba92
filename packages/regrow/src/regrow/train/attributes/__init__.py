"""Values besides tensors that objects around protected modules hold. Start with `hanging.py`."""
