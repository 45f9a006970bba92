"""Batches whose rows are answered by a Python function: several calls a row, multi-turn chats, or anything else.

`calls` is the function's interface to the servers, `running` runs it over all rows. The calls use the same head as the
rows of a file: the same judgement, the same pool, the same second tries.
"""
