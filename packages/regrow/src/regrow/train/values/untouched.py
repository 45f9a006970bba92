"""With `--no-script-rewrite`, finds variables that carry values between bodies, but may not be written: refuses them.

Those that are found only after the rehearsal are reported, and the job does not exit with 0. See decision 0110.
"""

from collections.abc import Callable, Iterable, Mapping
from types import FrameType

from regrow.core.errors import NotPlain, TooLarge, UsageError
from regrow.train.attributes.kept_values import Attributes
from regrow.train.script.namespaces import Namespace, namespaces
from regrow.train.script.read_first import BodyReads, loop_read
from regrow.train.values.arrays import ARRAYS, Keep
from regrow.train.values.plain import PLAIN, GrownCopy, keep, same, still

_KINDS = PLAIN | ARRAYS
_CURE = (
    "keep it in an object with state_dict and load_state_dict, given to session.protect, or take step.number where "
    "that counts it; without --no-script-rewrite regrow puts it back by itself"
)


class Untouched:
    """Finds variables of functions and modules that would have to be written.

    Args:
        note: called with a sentence on each of these variables that is found after the rehearsal.
        ignores: returns True for values that mean nothing after a fault.
    """

    def __init__(self, note: Callable[[str], object], ignores: Callable[[object], bool]) -> None:
        self._note, self._ignores = note, ignores
        self._reads: BodyReads | None = None
        self._of = 0
        self._missed: dict[str, None] = {}
        self._counting = False

    def requests_step(self, frames: Iterable[FrameType]) -> None:
        """Find what bodies carry in the loop at the present line of one of these frames, which requests a step."""
        if found := loop_read(frames):
            space, self._reads = namespaces([found[0]])[0], found[1]
            self._of, values = _of(space), space.read()
            carried = [
                each for each in self._reads.first & self._reads.written if type(values.get(each, self)) in _KINDS
            ]
            self._miss(space, [name for name in carried if not self._ignores(values[name])])

    def differ(self, space: Namespace | Attributes, kept: Mapping[str, object]) -> bool:
        """True if nothing may be written in this place; then note the variables that are not as they were kept."""
        if space.of_frames:
            now = space.read()
            unlike = [name for name in kept if not _alike(kept[name], now.get(name, self))]
            self._miss(space, [name for name in unlike if not self._ignores(kept[name])])
        return space.of_frames

    def receive(self, space: Namespace | Attributes, name: str, value: object, present: object, *, over: bool) -> bool:
        """As `differ`, for a value received from others; `over`: no step follows."""
        if space.of_frames and not _alike(keep(value, Keep.CONTENT), present):
            self._miss(space, [name], over=over)
        return space.of_frames

    def rehearsed(self, *, refuses: bool) -> None:
        """End the rehearsal: later findings are reported. Raises `UsageError` for those until now, if `refuses`."""
        missed, self._missed, self._counting = list(self._missed), {}, True
        if missed and refuses:
            raise UsageError(
                f"the loop's body carries {', '.join(missed[:5])} to the next, and --no-script-rewrite keeps regrow "
                "from putting that back after a fault",
                hint=_CURE,
            )

    def _miss(self, space: Namespace | Attributes, names: Iterable[str], *, over: bool = False) -> None:
        for name in (each for each in sorted(names) if self._is_needed(space, each, over)):
            self._missed[text := f"`{name}` of {space.name}"] = None
            if self._counting:
                self._note(f"{text} is not put back after a fault, as --no-script-rewrite is given: {_CURE}")

    def _is_needed(self, space: Namespace | Attributes, name: str, over: bool) -> bool:
        """False for a variable that each body writes before it reads it, and that nothing reads after the loop."""
        if self._reads is None or not isinstance(space, Namespace) or _of(space) != self._of:
            return True
        certain = name in self._reads.certain and not over
        return name in self._reads.first or (name in self._reads.outside and not certain)


def _of(space: Namespace) -> int:
    """A number for the code whose variables these are: a function's or a module's."""
    return id(space.frame.f_code if space.owner is space.frame else space.owner)


def _alike(kept: object, present: object) -> bool:
    """True if the values are equal, or the present one is not plain, so that it would not be written anyway."""
    if isinstance(kept, GrownCopy) or still(kept, present):
        return still(kept, present)
    try:
        return same(kept, keep(present, Keep.CONTENT))
    except (NotPlain, TooLarge):
        return True
