"""A received graph of objects is data of others: what it says is bounded before memory is asked for or read."""

from typing import Any

import numpy as np
import pytest

from regrow.core.errors import StateError
from regrow.hydration.codec import encode
from regrow.train.graphs.object_graph import ObjectGraph


class Holds:
    def __init__(self, thing: object) -> None:
        self.thing = thing


FULL = ["array", "", "", ["|u1", [8], "C", True, [0, 8]]]


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ([FULL, ["array", "", "", ["|O", [1], [8], True, 0, (1,)]]], "no type of numbers"),
        ([FULL, ["array", "", "", [[["a", "|O"]], [1], [8], True, 0, (1,)]]], "no type of numbers"),
        ([["dtype", "", "", "|O"]], "no type of numbers"),
        ([["dtype", "", "", "|V8"]], "no type of numbers"),
        ([["array", "", "", ["|O", [1], "C", True, [0, 8]]]], "no type of numbers"),
        ([["array", "", "", ["|u1", [1 << 50], "C", True, [0, 8]]]], "another number of bytes"),
        ([["array", "", "", ["|u1", [16], "C", True, [0, 16]]]], "of 8 that were received"),
        ([["array", "", "", ["|u1", [8], "C", True, [-1, 8]]]], "no list of lengths"),
        ([["array of objects", "", "", [[1 << 50]]]], "another number of them"),
        (
            [["array of objects", "", "", [[1], None]], ["array", "", "", ["|u1", [8], [1], True, 0, (1,)]]],
            "no array of",
        ),
        ([["bytearray", "", "", 1 << 50]], "no bytes"),
        ([["tensor", "", "", ["float32", [1 << 50], [1], 0, [0, 8]]]], "outside its memory"),
        ([["tensor", "", "", ["float32", [2], [1], 0, [7, -1]]]], "nothing was kept"),
        ([["tensor", "", "", ["float32", [2], [-1], 1, [0, 8]]]], "no list of lengths"),
        ([["bit generator", "PCG64", "", [0, [0, [], 1 << 50, 0]]]], "a pool of"),
        ([["bit generator", "MT19937", "", [0, None]]], "points outside"),
        ([["numpy random state", "", "", [0, None]]], "points outside"),
        ([["tuple", "", "", [(1,)]]], "RecursionError"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_is_made(nodes: list[Any], why: str) -> None:
    graph = ObjectGraph({"env": Holds(None)})
    told = graph.state_dict()
    root = ["object", f"{__name__}:Holds", "env", [["thing", (len(nodes),)], []]]
    place = np.random.RandomState(1).get_state(legacy=False)
    place["state"]["pos"] = 1 << 20
    forged = {"graph": np.frombuffer(encode([root, *nodes]), np.uint8), "data": np.zeros(8, np.uint8), "kept": [place]}
    with pytest.raises(StateError, match=why):
        graph.load_state_dict({**told, **forged})


def test_structures_of_numbers_and_text_are_carried() -> None:
    kind = np.dtype([("at", "<i4", (2,)), ("name", "<U3"), ("day", "<M8[D]")], align=True)
    one, other = Holds(np.ones(2, kind)), Holds(np.zeros(2, kind))
    graph = ObjectGraph({"env": other})
    graph.load_state_dict(ObjectGraph({"env": one}).state_dict())
    assert other.thing.tobytes() == one.thing.tobytes()  # type: ignore[attr-defined]
