"""Values that a script's other module keeps."""

from typing import Any

import torch

seen, names = 0, ["first"]
total = torch.zeros(2)
table: dict[str, Any] = {"best": 0.0}


def count(number: int) -> None:
    """Changes each of them."""
    global seen, total
    seen += 1
    names.append(str(number))
    total = total + number
    table["best"] = max(table["best"], float(number))
