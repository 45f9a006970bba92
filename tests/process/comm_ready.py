"""Imported last by the process that worlds are forked from: it changes no more."""

import gc

from tests.huge_pages import collapse

gc.collect()
gc.freeze()
collapse()
