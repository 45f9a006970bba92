"""Simulates a job of up to hundreds of thousands of ranks over weeks: cost of faults and capacity under each policy.

Between two incidents time passes in closed form, without an event for each step. For regrow's policy the coordinator's
own state machine decides about an incident: it is put into the same situation in a small world (`precedents.py`). The
durations are measured costs (`costs.py`). Files: `scenario.py` and `reading.py`, the input; `arrivals.py`, faults and
capacity over time; `deciding.py`, remedies; `simulation.py` and `accounting.py`, one job through time; `summary.py`,
`report.py` and `drawing.py`, the results; `calibration.py`, costs from real runs.
"""
