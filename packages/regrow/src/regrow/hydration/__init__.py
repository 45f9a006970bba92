"""State from living peers: the naming, planning, transfer, checking and storage of training state.

This package knows nothing of models or optimizers. It moves named tensors and one blob of small Python state from a
`StateSource` to a `StateSink` (`inventory.py`), which `train` implements.

* `codec.py`: small Python state as bytes, exactly, and never by pickle.
* `inventory.py`: description of a holder's state: names, shapes, dtypes, sizes.
* `plan.py`: which holder sends which bytes (pure).
* `memory.py`: the bytes of a tensor, in place where possible, else staged.
* `messages.py`, `server.py`, `client.py`: the protocol between a newcomer and all healthy holders at once.
* `copies`: a copy of one rank's state in shared memory, which outlives the worker.
* `durable`: the same state on disk, in the format of `torch.distributed.checkpoint`; the last resort.

Two guarantees hold everywhere: nothing that came over a network is unpickled, and no bytes are used as state before
their xxh3 checksum matched.
"""
