"""Tokenizers: bytes, a `tokenizer.json`, or a function of the user."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line

Tokens = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Tokenizer:
    """Converts the text of a document to tokens, of any integer dtype.

    `digest` changes when the tokens may change. `vocabulary`: upper bound of the tokens, exclusive; None if unknown.
    `id_of`: the number of a token given by its text; None if there is none.
    """

    name: str
    digest: str
    vocabulary: int | None
    encode: Callable[[str], Tokens]
    id_of: Callable[[str], int | None] = lambda _: None


def load_tokenizer(spec: str) -> Tokenizer:
    """Load the tokenizer named by `bytes`, the path of a `tokenizer.json`, or `module:function`. Raises `UsageError`.

    The tokens of `bytes` are those of UTF-8, so that 256 is free for the end of a document. Special tokens around a
    text are not added. A function can have 16-bit tokens if its attribute `vocabulary` allows it.
    """
    if spec == "bytes":
        return Tokenizer(
            "bytes", "bytes", 256, lambda text: np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8)
        )
    if spec.endswith(".json") or Path(spec).exists():
        return _of_file(Path(spec))
    if ":" in spec:
        return _of_function(spec)
    raise UsageError(
        f"there is no tokenizer {spec!r}", hint="give bytes, the path of a tokenizer.json, or module:function"
    )


def _of_file(path: Path) -> Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            f"--tokenizer {path} needs tokenizers, which is not installed", hint=install_line("tokenizers")
        ) from error
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_bytes()
        loaded: Any = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        raise UsageError(f"--tokenizer {path} cannot be read: {error.strerror}", hint="check the path") from error
    except Exception as error:  # the library raises bare exceptions
        raise UsageError(f"--tokenizer {path} is no tokenizer.json: {error}", hint="check the path") from error
    loaded.no_padding()
    loaded.no_truncation()

    def encode(text: str) -> Tokens:
        return np.array(loaded.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    above = max(loaded.get_vocab().values(), default=-1) + 1
    return Tokenizer(path.name, xxhash.xxh3_128_hexdigest(content), above, encode, loaded.token_to_id)


def _of_function(spec: str) -> Tokenizer:
    module_name, _, function_name = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # like `python -m`: find modules in the working folder
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(f"--tokenizer {spec}: importing {module_name} failed: {error!r}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"--tokenizer {spec}: {module_name} has no function {function_name!r}")

    def encode(text: str) -> Tokens:
        tokens = np.asarray(function(text))
        if tokens.size and (tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer)):
            raise ValueError(f"{spec} gave {tokens.dtype} {list(tokens.shape)}, not a list of integers")
        return tokens.astype(np.int64)

    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        source = repr(module)  # a compiled module has only its name and path
    vocabulary: int | None = getattr(function, "vocabulary", None)
    return Tokenizer(spec, xxhash.xxh3_128_hexdigest(source.encode()), vocabulary, encode)
