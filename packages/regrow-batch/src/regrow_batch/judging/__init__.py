"""Judgement of a row without an answer: who is at fault, and what becomes of the row.

The decisions are pure: `evidence` keeps what workers and rows have shown, `second` chooses the rows that are tried
elsewhere too. `queue` has the rows that wait; `attempts` sends them and settles what comes back, `doubts` asks others
about rows that are refused, `penalties` asks a worker whether it heeds one, `results` writes lines.
"""
