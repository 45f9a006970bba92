"""The inputs in pieces, one a shard: by bytes, row groups or record batches, so that one large file is many pieces."""

from dataclasses import dataclass

from regrow.core.errors import UsageError
from regrow.data.packing.corpus import Done, Input, Shard
from regrow.data.sources.blocks import ARROW, PARQUET, TableFile
from regrow.data.sources.files import SourceFile

TEXT = (".jsonl", ".json", ".ndjson")


@dataclass(frozen=True)
class Part:
    """One piece of an input.

    `begin` to `end`: bytes of a text, of which the lines that begin there belong to it, or numbers of row groups or
    record batches. `weight`: the bytes it counts for in progress.
    """

    number: int
    source: SourceFile
    begin: int
    end: int
    weight: int

    @property
    def is_table(self) -> bool:
        """Whether it counts blocks, not bytes."""
        return self.source.suffix in PARQUET + ARROW

    def done(self, shard: Shard) -> Done:
        """The note that the shard of this piece is done."""
        source = Input(self.source.name, self.source.size, self.source.version)
        return Done(shard, source, self.begin, self.end)


def split(inputs: list[SourceFile], column: str, shard_bytes: int) -> list[Part]:
    """The pieces of all inputs in order; they depend on the inputs and `shard_bytes` alone.

    A compressed text is one piece. Raises `UsageError` for a file of an unknown kind or without the column.
    """
    pieces: list[tuple[SourceFile, int, int, int]] = []
    for source in inputs:
        if source.suffix in TEXT:
            pieces += [(source, *cut) for cut in _byte_ranges(source, shard_bytes)]
        elif source.suffix in PARQUET + ARROW:
            pieces += [(source, *cut) for cut in _block_ranges(source, column, shard_bytes)]
        else:
            kinds = ", ".join((*TEXT, *(f"{suffix}.gz" for suffix in TEXT), *PARQUET, *ARROW))
            raise UsageError(f"{source.name} is of no kind that can be packed", hint=f"its name must end in {kinds}")
    return [Part(number, *piece) for number, piece in enumerate(pieces)]


def _byte_ranges(source: SourceFile, shard_bytes: int) -> list[tuple[int, int, int]]:
    if source.is_gzip:
        return [(0, source.size, source.size)]
    starts = range(0, source.size, shard_bytes)
    return [(begin, end := min(begin + shard_bytes, source.size), end - begin) for begin in starts]


def _block_ranges(source: SourceFile, column: str, shard_bytes: int) -> list[tuple[int, int, int]]:
    sizes = TableFile(source, (column,)).open().sizes
    ranges: list[tuple[int, int, int]] = []
    begin, weight = 0, 0
    for block, size in enumerate(sizes):
        weight += size
        if weight >= shard_bytes or block == len(sizes) - 1:
            ranges.append((begin, block + 1, weight))
            begin, weight = block + 1, 0
    return ranges
