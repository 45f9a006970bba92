"""The rehearsal of a loop's body, and the checks of the script that it allows. Start with `rehearsal.py`."""
