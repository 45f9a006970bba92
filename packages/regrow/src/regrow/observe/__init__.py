"""What happened in a job: its records, what they add up to, and how they look.

`record` writes them, `tail` reads them. `ledger` adds them up, `scene` is the present, `story` puts them into
sentences, `curve` and `live` draw them on a terminal, `receipt` compares two runs. Imports no torch.
"""
