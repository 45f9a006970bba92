"""Judgement of a row without an answer: the side at fault, and the row's next attempt or its result.

The decisions are pure: `evidence` keeps what workers and rows have shown, `second` chooses the rows that are also tried
elsewhere. `queue` holds the waiting rows; `attempts` sends them and settles the outcomes; `doubts` asks other workers
about refused rows; `penalties` checks whether a worker applies the LZ penalty; `results` writes the lines.
"""
