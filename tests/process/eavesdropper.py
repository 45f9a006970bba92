"""Reads all that crosses a bridge between hosts, as who taps it would. In its namespace: `eavesdropper.py WORD...`.

Writes `ready`; at the end of its input, as JSON, how many connections had something said in them, those whose first
words are none of TLS, the words that were seen in clear, and how many bytes were heard in all.
"""

import json
import select
import socket
import struct
import sys

_ALL_FRAMES, _IPV4, _TCP, _SYN = 3, 0x0800, 6, 2
_ROOM = 64 << 20
_SO_RCVBUFFORCE = 33
_RECORDS = {20, 21, 22, 23}
"""The kinds of TLS records."""

Way = tuple[str, int, str, int]


class Ear:
    """Listener to the traffic until now."""

    def __init__(self, words: list[bytes]) -> None:
        self._words = words
        self._longest = max(map(len, words))
        self._starts: dict[Way, int] = {}
        self._tails: dict[Way, bytes] = {}
        self._first: dict[Way, bytes] = {}
        self.seen: set[str] = set()
        self.count = 0

    def hear(self, frame: bytes) -> None:
        """One Ethernet frame."""
        if len(frame) < 54 or struct.unpack_from("!H", frame, 12)[0] != _IPV4 or frame[23] != _TCP:
            return
        packet = frame[14:]
        packet = packet[: struct.unpack_from("!H", packet, 2)[0]]
        segment = packet[4 * (packet[0] & 15) :]
        source, to = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
        out, into, sequence = struct.unpack_from("!HHI", segment)
        way: Way = (source, out, to, into)
        if segment[13] & _SYN:
            self._starts[way] = (sequence + 1) & 0xFFFFFFFF
        said = segment[4 * (segment[12] >> 4) :]
        if not said:
            return
        self.count += len(said)
        if self._starts.get(way) == sequence:
            self._first[way] = said[:3]
        around = self._tails.get(way, b"") + said
        self.seen.update(word.decode() for word in self._words if word in around)
        self._tails[way] = around[-self._longest :]

    def told(self) -> dict[str, object]:
        clear = [way for way, first in self._first.items() if first[0] not in _RECORDS or first[1:2] != b"\x03"]
        return {"ways": len(self._first), "clear": clear, "seen": sorted(self.seen), "bytes": self.count}


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(*words: str) -> None:
    """Listen until the input ends."""
    ear = Ear([word.encode() for word in words])
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_FRAMES))
    tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)
    say("ready")
    while True:
        ready, _, _ = select.select([tap, sys.stdin], [], [])
        if tap in ready:
            frame, (_, _, kind, *_) = tap.recvfrom(1 << 17)
            if kind != socket.PACKET_OUTGOING:  # each goes in at one port and out at another
                ear.hear(frame)
        elif sys.stdin in ready:
            break
    say(json.dumps(ear.told()))


if __name__ == "__main__":
    main(*sys.argv[1:])
