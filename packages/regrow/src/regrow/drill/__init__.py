"""`regrow doctor --train`: injects faults into small trainings on a user's own machines, and judges each check.

`checks.py` is the table of checks; `judging.py` and `verdict.py` judge results and are pure; `session.py` runs each
check in a process of its own (`__main__.py`) with a time limit, and ends everything that it started. Trainings are jobs
of `regrow run` (`ground.py`) with the scripts in `scripts/`; faults come from fault plans, and from kills from outside.
"""
