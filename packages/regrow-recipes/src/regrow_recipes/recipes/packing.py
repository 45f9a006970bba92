"""Packs documents into rows of one length. *Pure*: it takes lengths and returns places."""

from collections.abc import Sequence

_OPEN = 64
"""Number of open rows, all of which are searched for each document."""


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The documents of each row: best fit among the open rows, in a deterministic order.

    Args:
        lengths: of the documents; none exceeds the length of a row.
        room: length of a row, in tokens.
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
    """The (start, stop) of each piece of a document that is longer than a row."""
    return [(start, min(start + room, length)) for start in range(0, length, room)]
