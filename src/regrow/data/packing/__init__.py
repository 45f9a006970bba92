"""Pre-tokenized corpora: `regrow data pack` makes them, `regrow.data.PackedTokens` reads them. No torch here.

A corpus is a folder. `tokens-000000.bin` and so on hold the tokens of all documents one after another, little-endian
uint16 or uint32; `tokens-000000.idx` says, as int64, where in it each document ends; `corpus.json` says what it was
made of and what belongs to it, and is written last.

* `corpus` is that format; `tokenizing` turns text into tokens; `parts` cuts the inputs into pieces, one a shard, in a
  way that depends on the inputs alone; `documents` reads the texts of a piece.
* `shard` makes one shard, `worker` does so in a process of its own, `packer` deals the pieces out to workers,
  `progress` shows how far they are.
"""
