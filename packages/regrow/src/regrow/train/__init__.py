"""What a training script touches: the session, its steps, and the state it protects.

`session.py` and `step.py` are the script's view, `loop.py` runs the steps, `restartable.py` what is between them.

* `state`: modules, optimizers and other objects as one state that can be named, read, written, remembered and put back.
* `worker`: how a worker takes part in a job (`worker/supervised.py`) or trains alone (`worker/standalone.py`), and one
  attempt at a step (`worker/body.py`).
* `gradients`: how the gradients of a step are summed, and what DDP and FSDP2 need for it.
* `adapters`: other frameworks' ways into regrow.
"""
