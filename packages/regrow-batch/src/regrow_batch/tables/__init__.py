"""Data as people have it: records of files of all kinds become rows, and results become tables again.

`files` reads records, `making` says how one becomes a row (*pure*), `inputs` makes lines of OpenAI's batch format of
them; `columns` says what a column of the output has of a result (*pure*), and `outputs` writes.
"""
