"""Data sets in files: JSON Lines, Parquet, Arrow; given by path, glob, or any URL that fsspec supports.

They use Hugging Face `datasets` (`pip install 'regrow[data]'`): files that cannot be read in place are copied once per
node into an Arrow file of the cache folder, which all processes map.

* `files` finds the files of a path, a glob or a URL, and detects a file that has changed since.
* `rows` opens files as a `datasets.Dataset`; `records` parses a line to a dict, or to an error with its location.
* `sets` are the map-style data sets for scripts; only they import torch.
"""
