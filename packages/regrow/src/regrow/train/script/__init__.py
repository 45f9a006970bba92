"""The script's source text and frames, read before the first step and after a fault. Start with `asked_loop.py`."""
