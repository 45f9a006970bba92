"""Pre-tokenized corpora: `regrow data pack` makes them, `regrow.data.PackedTokens` reads them. No torch here.

A corpus is a folder. `tokens-000000.bin` and so on hold the tokens of all documents one after another, little-endian
uint16 or uint32; `tokens-000000.idx` says, as int64, where in it each document ends; `corpus.json` says what it was
made of and what belongs to it, and is written last.

* `corpus` is that format and reads the manifest; `writing` writes the files.
* `packer` is the command; `tokenizing` are the tokenizers, `encoding` applies them by `datasets.map`.
"""
