"""Pre-tokenized corpora: `regrow data pack` makes them, `regrow.data.PackedTokens` reads them. No torch here.

A corpus is a folder. `tokens-000000.bin` and so on hold the tokens of all documents one after another, little-endian
uint16 or uint32; `tokens-000000.idx` has the offset at which each document ends in it, as int64; the manifest
`corpus.json` lists the inputs and the shards, and is written last.

* `corpus` defines that format and reads the manifest; `writing` writes the files.
* `packer` is the command; `tokenizing` defines the tokenizers, `encoding` applies them with `datasets.map`.
"""
