"""Names under which people know other products, so that a script runs before all of it is rewritten.

Each name says once, in one line of the log, what takes its place. What has no counterpart here raises `UsageError` with
the cure: nothing is pretended. The names are those of public documentation; no code of theirs is here.
"""
