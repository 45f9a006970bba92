"""Training from recipes, adapters for other libraries' trainers, and tools to move a script to regrow.

All of it is built on the engine as a script is.

* `recipes`: models trained from a file of a few lines.
* `adapters`: trainers of other libraries, whose updates become steps.
* `port`: proposes the changes that a script needs, from its text alone. Pure.
* `compat`: the Python names of HyperPod.
"""
