"""Process groups that are formed anew in place, the job's key-value store, and groups that answer locally (echo).

`torch_private` has all uses of names that torch does not promise to keep.
"""
