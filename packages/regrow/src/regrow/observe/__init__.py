"""Observation of a job: writes, sums up and displays its records.

`record` writes them, `tail` reads them. `ledger` adds them up, `scene` has the present state, `story` puts them into
sentences, `curve` and `live` draw them on a terminal, `receipt` compares two runs. Imports no torch.
"""
