"""Lays out DDP's buckets again after a backward was cut off: in time, and without other ranks, which keep theirs."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.utils.hooks import RemovableHandle

from regrow.comm.torch_private.internals import keep_from_compiler
from regrow.train.gradients.wrappers import Modules


class Settling:
    """Lays out DDP's buckets again when that is necessary.

    Args:
        local: returns a context in which collectives are answered locally.
    """

    def __init__(self, local: Callable[[], AbstractContextManager[None]]) -> None:
        self._local = local
        self._hooks: list[RemovableHandle] = []

    def settle(self, modules: Modules) -> None:
        """Before a forward, lay out again the buckets that need it, as far as possible."""
        if modules.unsettled:
            with self._local():
                modules.settle()
            self._unhook(modules)

    def cut_off(self, modules: Modules, error: BaseException) -> None:
        """Prepare for the next step after `error` ended one. If a body has several forwards, each settles buckets."""
        modules.reset(error)
        if modules.unsettled and not self._hooks:

            def settle(*_: object) -> None:
                self.settle(modules)

            keep_from_compiler(settle)
            self._hooks = [module.register_forward_pre_hook(settle) for module in modules.replicated]

    def _unhook(self, modules: Modules) -> None:
        if not modules.unsettled:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
