"""Observation of a job: its records, their sums, and their display.

`record` writes them, `tail` reads them. `ledger` adds them up, `scene` is the present, `story` puts them into
sentences, `curve` and `live` draw them on a terminal, `receipt` compares two runs. Imports no torch.
"""
