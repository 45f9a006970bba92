"""Identity of a loader's batches: 16 bytes that change with data set, transforms, order and format.

Processes that run the same script get the same identity; another job or another transform gets a different one. A
change that cannot be detected, such as in a file that a transform reads or in a compiled module, needs a new `version`
from the user.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import xxhash

from regrow.core.messages.data import OrderSpec
from regrow.data.cache.evenly import sampled
from regrow.data.cache.layout import FORMAT, IDENTITY_BYTES
from regrow.data.cache.walking import Walk, file_state

_LONGEST = 80
_FEW = 200
_KINDS = (bool, int, float, str, type(None))


class Identified(Protocol):
    """A loader that can be identified, such as `regrow.data.described.CachedLoader`."""

    @property
    def dataset(self) -> Any:
        """The data set."""
        ...

    @property
    def collate_fn(self) -> Any:
        """The function that makes a batch from samples."""
        ...

    @property
    def spec(self) -> OrderSpec:
        """The order."""
        ...

    @property
    def seed(self) -> int:
        """The session's seed."""
        ...

    @property
    def version(self) -> str:
        """The version that the user gives the transform."""
        ...

    @property
    def parts(self) -> tuple[Any, ...]:
        """Everything else that determines a batch."""
        ...


class Identity(NamedTuple):
    """Identity of a loader's batches. `value`: 16 bytes. `parts`: a value or a digest for each ingredient's name."""

    value: bytes
    parts: dict[str, str]


def described(loader: Identified) -> Identity:
    """The identity of a loader's batches, with its ingredients."""
    return describe(
        loader.dataset, loader.collate_fn, loader.spec, loader.seed, version=loader.version, parts=loader.parts
    )


def describe(
    dataset: Any, collate_fn: Any, spec: OrderSpec, seed: int, *, version: str = "", parts: tuple[Any, ...] = ()
) -> Identity:
    """The identity of the batches that these arguments determine, with its ingredients.

    It takes milliseconds for any size of data: large arrays and lists are sampled evenly, so a change of a few samples
    of many can go unnoticed if neither a fingerprint nor a file's modification time shows it. Never raises, even if the
    data set's own methods do.
    """
    walk = Walk()
    ingredients = {
        "the format of the cache": str(FORMAT),
        "the version given by the script": version,
        "the seed": str(seed),
        "the data set's type": f"{type(dataset).__module__}.{type(dataset).__qualname__}",
        "the data set's length": _length(dataset),
        "the data set's code": walk.digest(type(dataset)).hex(),
        "the collate function": walk.digest(collate_fn).hex(),
        "the loader": walk.digest(parts).hex(),
    }
    order: dict[str, Any] = msgspec.to_builtins(spec)
    ingredients |= {f"the order's {name.replace('_', ' ')}": _in_words(value) for name, value in order.items()}
    ingredients |= _of_attributes(walk, dataset)
    if type(dataset).__module__ == "__main__":
        # The module is named `__main__` only in some ways of starting the script.
        ingredients["the data set's type"] = type(dataset).__qualname__
    return Identity(_value(ingredients), ingredients)


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Describe the differences between the parts of two identities; empty if there are none."""
    words: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was == now:
            continue
        if was is None or now is None:
            words.append(f"{name} {'is new' if was is None else 'is gone'}")
        elif _is_digest(was) or _is_digest(now):
            words.append(f"{name} has changed")
        else:
            words.append(f"{name}: {was or 'none'} → {now or 'none'}")
    return words


def _of_attributes(walk: Walk, dataset: Any) -> dict[str, str]:
    """An ingredient for each attribute of the data set, so that `difference` can name the one that has changed."""
    ingredients: dict[str, str] = {}
    try:
        attributes = walk.attributes(dataset)
    except Exception as error:  # noqa: BLE001 - the data set's own method raised: its code and length remain
        return {"the data set's content": f"unreadable: {type(error).__name__}"}
    if not attributes or issubclass(type(dataset), list | tuple | dict):
        ingredients["the data set's content"] = walk.digest(dataset).hex()
    for name, value in attributes.items():
        ingredients[f"the data set's {name}"] = _in_words(value) if type(value) in _KINDS else walk.digest(value).hex()
        if files := _files(value):
            ingredients[f"the files of the data set's {name}"] = files
    return ingredients


def _files(value: Any) -> str:
    """Digest of sizes and modification times of the files that an attribute names; empty if it names none."""
    kind = type(value)
    names = [value] if kind is str else list(sampled(value)) if kind in (list, tuple) else []
    states = [file_state(name) for name in names if isinstance(name, str) and 0 < len(name) < 4096]
    return xxhash.xxh3_128_hexdigest("\n".join(states).encode()) if any(states) else ""


def _in_words(value: Any) -> str:
    text = repr(value)
    # A long text is cut and its digest appended.
    return (
        text
        if len(text) <= _FEW
        else f"{text[:_LONGEST]}… {xxhash.xxh3_128_hexdigest(text.encode('utf-8', 'replace'))}"
    )


def _length(dataset: Any) -> str:
    try:
        return str(len(dataset))
    except Exception as error:  # noqa: BLE001 - an iterable data set has no length, and may raise any error
        return f"none ({type(error).__name__})"


def _is_digest(text: str) -> bool:
    return len(text) == 2 * IDENTITY_BYTES and all(letter in "0123456789abcdef" for letter in text)


def _value(ingredients: Mapping[str, str]) -> bytes:
    text = msgspec.json.encode(sorted((name, ingredients[name]) for name in ingredients))
    return xxhash.xxh3_128_digest(text)
