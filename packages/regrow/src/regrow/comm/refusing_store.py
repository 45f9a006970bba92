"""The store that `torch.distributed` gets: regrow's groups need none, and torch's own groups must not use it."""

from datetime import timedelta
from typing import NoReturn

from regrow.comm.torch_private.internals import Store
from regrow.core.errors import UsageError


class RefusingStore(Store):
    """Raises an error when a group asks for its peers, instead of waiting for keys that never come.

    A group of another backend could not be ended at a fault, nor be formed again with the survivors.
    """

    def set(self, key: str, value: str | bytes) -> NoReturn:
        """Raises `UsageError`."""
        self._refuse()

    def get(self, key: str) -> NoReturn:
        """Raises `UsageError`."""
        self._refuse()

    def add(self, key: str, amount: int) -> NoReturn:
        """Raises `UsageError`."""
        self._refuse()

    def check(self, keys: list[str]) -> NoReturn:
        """Raises `UsageError`."""
        self._refuse()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> NoReturn:
        """Raises `UsageError`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UsageError(
            "a process group was asked for with a backend that is not served here, and could not be formed again",
            hint="leave out backend=, or name gloo, or nccl where there are GPUs: regrow takes their place",
        )
