"""`regrow doctor --train`: small trainings that are struck on a user's own machines, each check judged on its own.

`checks.py` is the table of checks, `judging.py` and `verdict.py` decide from results and are pure, `session.py` has
each check carried out by a process of its own (`__main__.py`) with a limit, and ends all that came of it. Trainings are
jobs of `regrow run` (`ground.py`) with the scripts in `scripts/`; faults are fault plans, and kills from outside.
"""
