"""Batches whose rows are answered by a function of Python: several calls a row, turns of a talk, whatever it does.

`calls` is what such a function is given, `running` runs it over all rows. The calls go through the same head as the
rows of a file do: the same judgement, the same pool, the same second tries.
"""
