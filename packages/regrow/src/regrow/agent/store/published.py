"""Keys that ranks publish about themselves, such as their addresses. The reader of one soon asks for others.

So the first answer includes other keys: an agent gets all that ranks of this agent have written, and a worker all keys
of the same group that are known here. Readers send the number that they have, so that nothing is stored for each.
"""

from collections.abc import Callable

from regrow.agent.store.keys import generation_of
from regrow.agent.store.routing import is_direct
from regrow.core.ids import Generation

_VALUE_BYTES = 4 << 10
_TOGETHER_BYTES = 32 << 10
"""Most bytes of keys sent along with one answer; the rest is sent with the next."""


class Published:
    """The names of published keys, in the order in which they became known.

    Args:
        written: returns the value of a key that lives here and may be copied; else None.
        known: returns the value of a key that lives here or of which a copy is here; else None.
    """

    def __init__(self, written: Callable[[str], bytes | None], known: Callable[[str], bytes | None]) -> None:
        self._written, self._known = written, known
        self._here: dict[Generation, list[str]] = {}
        self._groups: dict[str, list[str]] = {}

    def note_written(self, key: str) -> None:
        """Note a published key that was written here."""
        generation = generation_of(key)
        if generation is not None and is_direct(key):
            self._here.setdefault(generation, []).append(key)
            self.note_known(key)

    def note_known(self, key: str) -> None:
        """Note a published key that was written here, or of which a copy has arrived."""
        if is_direct(key):
            self._groups.setdefault(group_of(key), []).append(key)

    def to_agent(self, asked: str, has: int) -> tuple[dict[str, bytes], int]:
        """Keys to send to an agent along with the requested one, and the number of keys from here that it then has."""
        generation = generation_of(asked)
        return _more([] if generation is None else self._here.get(generation, []), asked, has, self._written)

    def to_worker(self, asked: str, has: int) -> tuple[dict[str, bytes], int]:
        """Keys to send to a worker along with the requested one, and the number of its group's keys it then has."""
        return _more(self._groups.get(group_of(asked), []), asked, has, self._known)

    def drop_before(self, oldest: Generation) -> None:
        """Forget the generations before this one."""
        self._here = {known: names for known, names in self._here.items() if known >= oldest}
        self._groups = {
            group: names for group, names in self._groups.items() if (generation_of(group) or oldest) >= oldest
        }


def group_of(key: str) -> str:
    """Common prefix of the keys in which the ranks of one group publish their addresses."""
    return key.rpartition("/")[0]


def _more(
    names: list[str], asked: str, has: int, value_of: Callable[[str], bytes | None]
) -> tuple[dict[str, bytes], int]:
    found, left = dict[str, bytes](), _TOGETHER_BYTES
    for at in range(has, len(names)):
        key = names[at]
        value = None if key == asked else value_of(key)
        if value is None or len(value) > _VALUE_BYTES:
            continue
        left -= len(key) + len(value)
        if left < 0:
            return found, at
        found[key] = value
    return found, max(has, len(names))
