"""State from living peers: how training state is named, planned, moved, checked and written down.

The room knows nothing of models or optimizers. It moves named tensors and one blob of small Python state from a
`StateSource` to a `StateSink` (`inventory.py`); what these stand for is the business of `train`.

* `codec.py`: small Python state as bytes, exactly, and never by pickle.
* `inventory.py`: what a holder has: names, shapes, dtypes, sizes.
* `plan.py`: who sends which bytes (pure).
* `memory.py`: the bytes of a tensor, in place where possible, staged where not.
* `messages.py`, `server.py`, `client.py`: the conversation between a newcomer and all healthy holders at once.
* `copies`: a copy of one rank's state in shared memory, which outlives the worker.
* `durable`: the same state on disk, in the format of `torch.distributed.checkpoint`; the last resort.

Two promises hold everywhere: nothing that came over a network is unpickled, and no byte is taken for state before its
xxh3 checksum matched.
"""
