"""The rehearsal of a loop's body, and what it shows of the script. Start with `rehearsal.py`."""
