"""A job of up to hundreds of thousands of ranks over weeks: what faults and capacity cost it under several policies.

Between two incidents time passes in closed form, so a step of the whole world is no event at all. What is done about an
incident of regrow's is decided by the coordinator's own machine, which is put into the same situation in a small world
(`precedents.py`); what it takes comes from measured costs (`costs.py`). Files: `scenario.py` and `reading.py`, what is
simulated; `arrivals.py`, what happens when; `deciding.py`, what is done; `simulation.py` and `accounting.py`, one job
through time; `summary.py`, `report.py` and `drawing.py`, what came of it; `calibration.py`, costs from real runs.
"""
