"""Process groups that re-form in place, the job's key-value store, and echo groups.

`torch_private` has all uses of names that torch does not promise to keep.
"""
