"""What a training script touches: the session, its steps, and the state it protects.

`session.py` and `step.py` are the script's view, `loop.py` runs the steps; `naming.py`, `rollback.py` and `protect.py`
turn modules, optimizers and other objects into one state that can be named, read, written, remembered at the start of a
step and put back.
"""
