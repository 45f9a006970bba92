"""Trainings without code, trainers of others, and ways into regrow: what stands on the engine as a script does.

* `recipes`: models trained by a file of a few lines.
* `adapters`: trainers of other libraries, whose updates become steps.
* `port`: the changes that a script needs, by its text alone. Pure.
* `compat`: the names of another product.
"""
