"""Documents into rows of one length. *Pure*: lengths go in, places come out."""

from collections.abc import Sequence

_OPEN = 64
"""Rows that still take documents: one more is looked through for each document."""


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The documents of each row: best fit among the rows that are open, in an order that repeats itself.

    Args:
        lengths: of the documents, none longer than a row.
        room: tokens of a row.
    """
    rows: list[list[int]] = []
    left: dict[int, int] = {}
    for number, length in enumerate(lengths):
        fitting = [(space, row) for row, space in left.items() if space >= length]
        if fitting:
            _, row = min(fitting)
        else:
            row = len(rows)
            rows.append([])
            left[row] = room
            if len(left) > _OPEN:
                del left[min(left, key=lambda each: (left[each], each))]
        rows[row].append(number)
        left[row] -= length
        if not left[row]:
            del left[row]
    return rows


def split(length: int, room: int) -> list[tuple[int, int]]:
    """A document that is longer than a row, in pieces: (start, stop) of each."""
    return [(start, min(start + room, length)) for start in range(0, length, room)]
