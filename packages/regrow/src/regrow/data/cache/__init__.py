"""The cache of a node: batches made once, read by all workers of the node, and still there after any of them died.

An entry is one collated batch of one (step, share, shares), a file in a folder of the agent's. Its name is its key; its
folder is named by the identity: data set, order, code of the transforms, format. Another job or another transform
never gets its bytes.

* `tree` turns a batch into `nodes` and the buffers of its tensors (`leaves`), and back, with exact types.
* `layout` is the file: header, checksum, alignment; written by rename, read by a private mapping. Needs no torch.
* `entry` is both together: `encode`, `write`, `open_entry`.
* `keeping` decides (pure): what goes when room is short, what is made next.
* `folder` carries it out, and says so where the disk or the shared memory does not let it. Needs no torch.
* `identity` says whose batches these are, and in words what differs; `walking` and `evenly` digest code and values.
* `client` is the worker's side: `ahead` looks for the next entry, `reach` is the way to the producer.
* `producer` serves workers over `messages`; `making` decides with `entry_store` what a `batch_maker` makes; `forking`
  says whether a data set can be read in several processes.

Nothing here is unpickled. A half-written or bit-flipped entry is noticed, removed and made again, never served.
"""
