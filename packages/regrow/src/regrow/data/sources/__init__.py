"""Data sets in files: JSON Lines, Parquet, Arrow; here, behind a glob, or behind any URL that fsspec knows.

Hugging Face `datasets` does the work (`pip install 'regrow[data]'`): what cannot be read in place is copied once a node
into an Arrow file of the cache folder, which all processes map.

* `files` finds what a path, a glob or a URL names, and notices when a file is no longer the one that was found.
* `rows` opens files as a `datasets.Dataset`; `records` turns a line into a dict, or into an error with its place.
* `sets` are the map-style data sets of scripts; only they import torch.
"""
