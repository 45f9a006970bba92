"""Trainings without code: a recipe says which model, which data and where to; the rest is derived and shown.

* `schema` is what a recipe may say, `reading` turns TOML and words into it, with all errors at once. `methods/` holds
  the four that there are. *Pure*
* `facts` is what a model's `config.json` tells, `planning` what follows for memory, shards and steps. *Pure*
* `documents`, `packing` and `preparing` turn files of text, conversations and preferences into rows of tokens, once a
  node; `rows` gives them to the steps.
* `building`, `losses`, `exporting` and `progress` serve `training`, the one loop of all methods.
* `recipe_commands`, beside this room, has `regrow train` and `regrow recipes`.

What is imported without a recipe in use needs neither torch nor transformers.
"""
