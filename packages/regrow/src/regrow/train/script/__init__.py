"""The script's text and its frames: read before the first step and after a fault. Start with `asked_loop.py`."""
