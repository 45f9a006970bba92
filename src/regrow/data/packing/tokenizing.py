"""Text into tokens: bytes, a `tokenizer.json`, or a function of the user's."""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from regrow.core.errors import UsageError

Tokens = npt.NDArray[np.integer]


class Tokenizer(Protocol):
    """What turns the text of one document into tokens."""

    name: str
    digest: str
    """Changes when the tokens that it gives may."""
    vocabulary: int | None
    """Tokens are below this; None where that is not known."""

    def encode(self, text: str) -> Tokens:
        """The tokens of a document; any integer dtype, one dimension."""
        ...

    def id_of(self, token: str) -> int | None:
        """The number of a token that is named by its text; None where there is none."""
        ...


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `bytes`, a path of a `tokenizer.json`, or `module:function` names. Raises `UsageError`."""
    if spec == "bytes":
        return BytesTokenizer()
    if spec.endswith(".json") or Path(spec).exists():
        return FileTokenizer(Path(spec))
    if ":" in spec:
        return FunctionTokenizer(spec)
    raise UsageError(
        f"there is no tokenizer {spec!r}", hint="give bytes, the path of a tokenizer.json, or module:function"
    )


class BytesTokenizer:
    """The bytes of the text in UTF-8, 0 to 255; 256 is free for the end of a document."""

    name = "bytes"
    digest = "bytes"
    vocabulary: int | None = 256

    def encode(self, text: str) -> Tokens:
        """uint8."""
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)

    def id_of(self, token: str) -> int | None:
        """None: bytes have no names."""
        return None


class FileTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers`. Tokens that models want around a text are not added."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError as error:
            raise UsageError(
                f"--tokenizer {path} needs tokenizers, which is not installed",
                hint="pip install 'regrow[tokenizers]'",
            ) from error
        if path.is_dir():
            path = path / "tokenizer.json"
        try:
            content = path.read_bytes()
            self._loaded = Loaded.from_str(content.decode())
        except OSError as error:
            raise UsageError(f"--tokenizer {path} cannot be read: {error.strerror}", hint="check the path") from error
        except Exception as error:  # the library raises bare exceptions
            raise UsageError(f"--tokenizer {path} is no tokenizer.json: {error}", hint="check the path") from error
        self._loaded.no_padding()
        self._loaded.no_truncation()
        self.name = path.name
        self.digest = xxhash.xxh3_128_hexdigest(content)
        self.vocabulary: int | None = max(self._loaded.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> Tokens:
        """int64."""
        return np.array(self._loaded.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def id_of(self, token: str) -> int | None:
        """As the vocabulary has it."""
        number: int | None = self._loaded.token_to_id(token)
        return number


class FunctionTokenizer:
    """A function from a text to tokens. Its module's source is what tells versions apart.

    A function with an attribute `vocabulary` (tokens are below it) can have 16-bit tokens; others get 32.
    """

    def __init__(self, spec: str) -> None:
        module_name, _, function_name = spec.partition(":")
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does: modules that lie in the working folder
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UsageError(f"--tokenizer {spec}: importing {module_name} failed: {error!r}") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            raise UsageError(f"--tokenizer {spec}: {module_name} has no function {function_name!r}")
        self._function: Callable[[str], Sequence[int]] = function
        self.name = spec
        self.digest = xxhash.xxh3_128_hexdigest(_source_of(module).encode())
        given = getattr(function, "vocabulary", None)
        self.vocabulary = int(given) if given is not None else None

    def encode(self, text: str) -> Tokens:
        """What the function gives, as integers. Raises `ValueError` where it gives anything else."""
        tokens = np.asarray(self._function(text))
        if tokens.size == 0:
            return np.empty(0, dtype=np.int64)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{self.name} gave {tokens.dtype} {list(tokens.shape)}, not a list of integers")
        return tokens

    def id_of(self, token: str) -> int | None:
        """None: a function has no names."""
        return None


def _source_of(module: object) -> str:
    try:
        return inspect.getsource(module)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return repr(module)  # compiled: there is only its name and place
