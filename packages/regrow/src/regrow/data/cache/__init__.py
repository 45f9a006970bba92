"""The data cache of a node: batches made once, read by all workers of the node, and kept when any of them dies.

An entry is one collated batch of one (step, share, shares), a file in a folder of the agent. Its file name is its key;
its folder is named after the identity: data set, order, code of the transforms, format. Another job or another
transform never gets its bytes.

* `tree` converts a batch to `nodes` and the buffers of its tensors (`leaves`), and back, with exact types.
* `layout` is the file format: header, checksum, alignment; written by rename, mapped privately. Needs no torch.
* `entry` combines both: `encode`, `write`, `open_entry`.
* `keeping` selects (pure) the entries to evict when room is short, and those to make next.
* `folder` executes this, and raises errors of the disk or the shared memory. Needs no torch.
* `identity` identifies a loader's batches, and describes differences; `walking` and `evenly` digest code and values.
* `client` is the worker's side: `ahead` opens the next entry early, `reach` is the connection to the producer.
* `producer` serves workers over `messages`; `making` decides with `entry_store` which entries a `batch_maker` makes;
  `forking` checks if several processes can read a data set.

Nothing is unpickled. A half-written or bit-flipped entry is detected, removed and made again, never served.
"""
