"""Reads Xids, the NVIDIA driver's errors, from the kernel log; not applicable without the right to read it.

Format of /dev/kmsg: https://www.kernel.org/doc/Documentation/ABI/testing/dev-kmsg
"""

import os
import re
import time
from collections.abc import Iterator, Sequence

from regrow.core.ids import Instant, Seconds
from regrow.health.readings import NotApplicable, ProbeAt, ProbeSettings, QuietLog, Reading, XidReading

_LOG = "/dev/kmsg"
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:,\s*(.*))?")
_RECORD_BYTES = 8192
_MOST_RECORDS = 100_000
_MOST_XIDS = 64


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """The Xids of the last `window` seconds, or a `QuietLog`."""
    try:
        records = _records()
    except OSError as error:
        yield NotApplicable(f"{_LOG} cannot be read: {error.strerror}")
        return
    found = list(xids(records, time.monotonic(), settings.window))
    yield from found[-_MOST_XIDS:]
    if not found:
        yield QuietLog(settings.window)


def xids(records: Sequence[str], now: Instant, window: Seconds) -> Iterator[XidReading]:
    """The Xids among records of /dev/kmsg, `priority,sequence,microseconds,flags;text`, not older than `window`."""
    for record in records:
        head, _, text = record.partition(";")
        match, fields = _XID.search(text), head.split(",")
        if match is None or len(fields) < 3 or not fields[2].isdigit():
            continue
        ago = now - int(fields[2]) / 1e6
        if ago <= window:
            yield XidReading(match[1].lower(), int(match[2]), max(0.0, ago), (match[3] or "").strip())


def _records() -> list[str]:
    descriptor = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    records: list[str] = []
    try:
        while len(records) < _MOST_RECORDS:
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                break  # end of the log
            except BrokenPipeError:
                continue  # the record was overwritten: read the next one
            if not record:
                break
            records.append(record.decode(errors="replace"))
    finally:
        os.close(descriptor)
    return records
