"""Data sets in files: JSON Lines, Parquet, Arrow; here, behind a glob, or behind any URL that fsspec knows.

* `files` finds what a path, a glob or a URL names, and notices when a file is no longer the one that was found.
* `local` makes the local copies that a compressed or remote text needs to be sought in, once a node.
* `lines` knows where each line of a text begins; `records` turns a line into a dict, or into an error with its place.
* `blocks` reads row groups and record batches.
* `jsonlines`, `parquet` and `arrow` are the map-style data sets; only they import torch.
"""
