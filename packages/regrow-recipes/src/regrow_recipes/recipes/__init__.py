"""Training from a recipe, which names the model, the data and the output folder; the rest is derived and printed.

* `schema` defines the keys of a recipe; `reading` parses TOML and `key=value` words, and reports all errors at once.
    `methods/` has the built-in methods. *Pure*
* `facts` computes sizes from a model's `config.json`, `planning` the memory, shards and steps from these. *Pure*
* `documents`, `packing` and `preparing` turn files of text, conversations and preferences into rows of tokens, once
    for each node; `rows` reads the rows.
* `building`, `losses`, `exporting` and `progress` are parts of `training`, the loop that the methods share.
* `recipe_commands`, beside this folder, has `regrow train` and `regrow recipes`.

Modules that are imported when no recipe is in use need neither torch nor transformers.
"""
