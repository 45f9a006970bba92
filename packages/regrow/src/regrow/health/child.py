"""The process in which probes run: `python -m regrow.health.child`, which reads its order from standard input.

It writes lines of JSON to its original standard output; the output of libraries is redirected to standard error, so
that it does not mix with these lines.
"""

import importlib
import os
import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from regrow.health.probes import PROBES
from regrow.health.readings import Gave, Line, ProbeAt, ProbeOrder, Raised, Through

_LONGEST_ERROR = 2000
_ALARM_FACTOR = 2


def main() -> int:
    """Run the ordered probes, one after the other."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeOrder)
    # The parent kills this process after a deadline; the alarm does so if the parent itself was killed.
    signal.alarm(int(_ALARM_FACTOR * sum(PROBES[name].deadline for name in order.probes)) + 60)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)
        return _run(order, out)


def _run(order: ProbeOrder, out: BinaryIO) -> int:
    settings = order.settings
    for name in order.probes:
        device = ""
        _say(out, ProbeAt(name))
        try:
            module = importlib.import_module(f"regrow.health.probes.{PROBES[name].module}")
            for found in module.read(settings):
                if isinstance(found, ProbeAt):
                    device = found.device
                    _say(out, found)
                else:
                    _say(out, Gave(name, found))
        except Exception as error:  # noqa: BLE001 - any error of a driver's library is a result of the probe
            _say(out, Raised(name, device, f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]))
            return 1
        _say(out, Through(name))
        settings = msgspec.structs.replace(settings, skip=[])
    return 0


def _say(out: BinaryIO, line: Line) -> None:
    out.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the exit handlers of a library could hang or crash
