"""Ends a forward pass that nobody needs any more, at its next module call. Costs nothing until it is used."""

import threading
from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from regrow.core.errors import GenerationHalted


class ForwardInterrupt:
    """Raises `GenerationHalted` in the thread that made it, at the next call of any module, while `wanted()`."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._handle: Any = None
        self.struck = False
        """True if it has raised since it was cleared."""

    def set(self) -> None:
        """Interrupt from now on; from any thread."""
        with self._lock:
            if self._handle is None:
                self._handle = register_module_forward_pre_hook(self._check)

    def clear(self) -> None:
        """Let modules run again."""
        self.struck = False
        with self._lock:
            if self._handle is not None:
                self._handle.remove()
                self._handle = None

    def _check(self, *_: object) -> None:
        if threading.get_ident() == self._thread and self._wanted():
            self.struck = True
            raise GenerationHalted("this step will run again")
