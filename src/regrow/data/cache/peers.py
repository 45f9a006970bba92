"""The caches of other nodes, as a producer uses them: it takes what they have, and leaves them what it needs next.

Nothing here is needed. What fails is left alone for a while, and the producer makes its entries itself.
"""

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

import msgspec

from regrow.core.data_messages import PEERS_FILE, PeerList
from regrow.core.errors import ProtocolError
from regrow.core.ids import Instant, Seconds
from regrow.data.cache.doors import Door, NoRoom, NotThere
from regrow.data.cache.layout import Damaged, Key, key_of, name_of, received, write
from regrow.data.cache.offers import Offer, Offers

_LISTING_S: Seconds = 1.0
"""So long a list of entries counts as new."""
_AWAY_S: Seconds = 10.0
"""So long a peer that failed is left alone."""
_FULL_S: Seconds = 1.0
_LOOK_S: Seconds = 0.5
"""How often the list of peers is looked at."""
_SCAN_S: Seconds = 2.0
"""How often the folder is looked through for entries that workers have made."""
_BEHIND = 2
"""So many steps behind its readers are kept by the mirror: one that a fault had given up runs again."""
_END_S: Seconds = 3.0
_log = logging.getLogger("regrow")


class _PeersFile:
    """`peers.json`, read again when the agent has written another."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / PEERS_FILE
        self._seen: tuple[int, int] | None = None
        self._listed = PeerList()

    def read(self) -> PeerList:
        """What it says now. What is not there, or cannot be understood, says nothing."""
        try:
            about = self._path.stat()
            if self._seen != (about.st_ino, about.st_mtime_ns):
                self._listed = msgspec.json.decode(self._path.read_bytes(), type=PeerList)
                self._seen = (about.st_ino, about.st_mtime_ns)
        except FileNotFoundError:
            self._listed = PeerList()
        except (OSError, msgspec.MsgspecError) as error:
            _log.debug("%s cannot be read: %s", self._path, error)
            self._listed = PeerList()
        return self._listed


class _Peer:
    """One of the others: its door, what it said it has, and whether it is left alone."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.endpoint = endpoint
        self._door = Door(endpoint, token)
        self._listings: dict[bytes, tuple[Instant, dict[str, int]]] = {}
        self._away_until: Instant = 0.0

    def fetch(self, identity: bytes, name: str) -> bytes | None:
        """The entry, unchecked; None where it does not have it, or does not answer."""
        now = time.monotonic()
        if now < self._away_until:
            return None
        try:
            at, names = self._listings.get(identity, (-_LISTING_S, {}))
            if name not in names and now - at >= _LISTING_S:
                names = self._door.names(identity)
                self._listings[identity] = (time.monotonic(), names)
            return self._door.fetch(identity, name) if name in names else None
        except NotThere:
            self._listings.pop(identity, None)
        except (OSError, ProtocolError) as error:
            _log.debug("%s is left alone for %g s: %s", self.endpoint, _AWAY_S, error)
            self._away_until = time.monotonic() + _AWAY_S
        return None

    def mistrust(self, identity: bytes, name: str) -> None:
        """What it gave is damaged: it is not asked for this again until it lists it anew."""
        at, names = self._listings.get(identity, (0.0, {}))
        self._listings[identity] = (at, {known: size for known, size in names.items() if known != name})

    def close(self) -> None:
        """Hang up."""
        self._door.close()


class Peers:
    """The caches of other nodes. `take` and `offer` are for one thread; what is offered is sent by another.

    Args:
        folder: of this node's cache, with the list of peers in it.
        token: the job's secret.
        node: the name of this node.
    """

    def __init__(self, folder: Path, token: str, node: str) -> None:
        self._token = token
        self._file = _PeersFile(folder)
        self._peers: dict[str, _Peer] = {}
        self._sender = _Sender(folder, token, node)
        self.taken = 0
        """Entries that came from others."""

    def take(self, identity: bytes, key: Key, into: Path) -> bool:
        """Fetch an entry into the folder `into`, checked. Takes a moment; False: nobody who answers has it."""
        name = name_of(key)
        for peer in self._listed():
            data = peer.fetch(identity, name)
            if data is None:
                continue
            try:
                write(into, received(data, key, identity))
            except Damaged as error:
                _log.warning("an entry from %s is damaged and not used: %s", peer.endpoint, error)
                peer.mistrust(identity, name)
            except OSError as error:
                _log.debug("an entry of another node cannot be kept here: %s", error)
                return False
            else:
                self.taken += 1
                return True
        return False

    def offer(self, identity: bytes, key: Key, path: Path, keep_from: int) -> None:
        """There is an entry that is needed soon. All readers stand at step `keep_from` or later. Returns at once."""
        with contextlib.suppress(FileNotFoundError):  # it was evicted already
            self._sender.offer(Offer(identity, key, path, path.stat().st_size), keep_from)

    def passed(self, identity: bytes, step: int) -> None:
        """All readers stand at this step or a later one. Returns at once."""
        self._sender.passed(identity, step)

    @property
    def sent(self) -> int:
        """Entries that the mirror was given."""
        return self._sender.count

    def close(self) -> None:
        """Hang up on everybody. What was not sent is not sent any more."""
        self._sender.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _listed(self) -> list[_Peer]:
        endpoints = self._file.read().peers
        for endpoint in [known for known in self._peers if known not in endpoints]:
            self._peers.pop(endpoint).close()
        for endpoint in endpoints:
            if endpoint not in self._peers:
                self._peers[endpoint] = _Peer(endpoint, self._token)
        return [self._peers[endpoint] for endpoint in endpoints]


class _Sender:
    """Brings offers to the mirror, one after the other, in a thread that is started at the first one."""

    def __init__(self, folder: Path, token: str, node: str) -> None:
        self._folder = folder
        self._file = _PeersFile(folder)
        self._token = token
        self._node = node
        self._changed = threading.Condition()
        self._offers = Offers()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._mirror = ""
        self._door: Door | None = None
        self._away_until: Instant = 0.0
        self._scanned_at: Instant = 0.0
        self.count = 0

    def offer(self, offer: Offer, keep_from: int) -> None:
        """Remember it."""
        with self._changed:
            self._offers.passed(offer.identity, max(0, keep_from - _BEHIND))
            self._offers.add(offer)
            self._wake()

    def passed(self, identity: bytes, step: int) -> None:
        """What is older is needed no more."""
        with self._changed:
            self._offers.passed(identity, max(0, step - _BEHIND))
            self._wake()

    def _wake(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._work, name="regrow-data-mirror", daemon=True)
            self._thread.start()
        self._changed.notify()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join(_END_S)

    def _work(self) -> None:
        while (offer := self._next()) is not None:
            self._send(offer)
        if self._door is not None:
            self._door.close()

    def _next(self) -> Offer | None:
        """The next one to send, waited for; None at the end."""
        while True:
            listed = self._file.read()
            if listed.mirror != self._mirror:
                self._turn_to(listed.mirror)
            if self._mirror:
                self._scan()
            with self._changed:
                if self._closed:
                    return None
                if self._mirror and time.monotonic() >= self._away_until:
                    offer = self._offers.next(listed.mirror_bytes)
                    if offer is not None:
                        return offer
                self._changed.wait(_LOOK_S)

    def _turn_to(self, mirror: str) -> None:
        if self._door is not None:
            self._door.close()
        self._mirror, self._away_until = mirror, 0.0
        self._door = Door(mirror, self._token) if mirror else None
        had: dict[tuple[bytes, Key], int] = {}
        if self._door is not None:
            with contextlib.suppress(OSError, ProtocolError, NotThere, ValueError):  # then all of it is sent again
                for identity, names in self._door.kept(self._node).items():
                    keys = ((key_of(name), size) for name, size in names.items())
                    had |= {(bytes.fromhex(identity), key): size for key, size in keys if key is not None}
        with self._changed:
            self._offers.start_again(had)

    def _scan(self) -> None:
        """Workers write entries, too, where there is no producer; nobody tells of these."""
        now = time.monotonic()
        if now - self._scanned_at < _SCAN_S:
            return
        self._scanned_at = now
        with self._changed:
            identities = self._offers.identities
        for identity in identities:
            with contextlib.suppress(OSError), os.scandir(self._folder / identity.hex()) as entries:
                found = [(key, Path(each.path)) for each in entries if (key := key_of(each.name)) is not None]
                with self._changed:
                    new = [(key, path) for key, path in found if not self._offers.knows(identity, key)]
                offers = [Offer(identity, key, path, _size(path)) for key, path in new]
                with self._changed:
                    for offer in offers:
                        if not self._offers.knows(identity, offer.key):
                            self._offers.add(offer)

    def _send(self, offer: Offer) -> None:
        if self._door is None:
            return
        with self._changed:
            keep_from = self._offers.keep_from(offer.identity)
        pause: Seconds = 0.0
        sent = False
        try:
            self._door.leave(self._node, offer.identity, offer.path, step=offer.key.step, keep_from=keep_from)
            sent = True
        except NoRoom:
            pause = _FULL_S
        except (OSError, ProtocolError, NotThere) as error:
            if os.path.exists(offer.path):
                _log.debug("%s is left alone for %g s: %s", self._mirror, _AWAY_S, error)
                pause = _AWAY_S
        with self._changed:
            if sent:
                self._offers.sent(offer)
                self.count += 1
            elif pause:
                self._away_until = time.monotonic() + pause
            else:
                self._offers.gone(offer)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # evicted meanwhile, as whoever sends it will find
