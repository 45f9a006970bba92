"""Process groups that re-form in place, the job's key-value store, and echo groups.

`private.py` is the package's one door to torch's unstable names; everything else in the package goes through here.
"""
