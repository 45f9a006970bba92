"""The training script's side of regrow: the session, its steps, and the state that it protects.

The script uses `session.py` and `step.py`; `loop.py` runs the steps, `restartable.py` the functions between them.

* `state`: modules, optimizers and other objects as one state that is named, read, written, remembered and restored.
* `worker`: one worker's part in a job (`worker/supervised.py`) or alone (`worker/standalone.py`), and one
  attempt at a step (`worker/body.py`).
* `gradients`: sums of a step's gradients, and the handling of DDP and FSDP2 around them.
"""
