"""Whose fault it is that a row has no answer, and what becomes of the row.

What decides is pure: `evidence` keeps what workers and rows have shown, `second` says which rows are tried elsewhere
too. `queue` has the rows that wait; `attempts` sends them and settles what comes back, `doubts` asks others about rows
that are refused, `penalties` asks a worker whether it heeds one, `results` writes lines.
"""
