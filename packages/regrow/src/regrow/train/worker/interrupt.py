"""Interrupts a forward pass whose result is not needed, at its next module call. Costs nothing in other forwards."""

import threading
from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from regrow.core.errors import GenerationHalted
from regrow.core.ids import Seconds


class ForwardInterrupt:
    """Raises `GenerationHalted` in the thread that made it, at the next call of a module, while `wanted()` is True."""

    def __init__(self, wanted: Callable[[], bool]) -> None:
        self._wanted = wanted
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._handle: Any = None
        self._set = threading.Event()
        self.struck = False
        """True if it has raised since it was cleared."""

    def set(self) -> None:
        """Interrupt from now on. May be called from any thread."""
        with self._lock:
            self._set.set()
            if self._handle is None:
                self._handle = register_module_forward_pre_hook(self._check)

    def clear(self) -> None:
        """Let modules run again."""
        self.struck = False
        with self._lock:
            self._set.clear()
            if self._handle is not None:
                self._handle.remove()
                self._handle = None

    def await_set(self, most: Seconds) -> None:
        """Wait until `set` is called, `most` seconds at most."""
        self._set.wait(most)

    def _check(self, *_: object) -> None:
        if threading.get_ident() == self._thread and self._wanted():
            self.struck = True
            raise GenerationHalted("this step will run again")
