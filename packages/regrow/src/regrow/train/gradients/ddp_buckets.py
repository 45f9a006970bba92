"""DDP's buckets after a backward that was cut off: laid out anew in time, and without the others, who keep theirs."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from torch.utils.hooks import RemovableHandle

from regrow.comm.torch_private.internals import keep_from_compiler
from regrow.train.gradients.wrappers import Modules


class Settling:
    """Lays buckets out anew where that is due.

    Args:
        local: within it, collectives are answered locally.
    """

    def __init__(self, local: Callable[[], AbstractContextManager[None]]) -> None:
        self._local = local
        self._hooks: list[RemovableHandle] = []

    def settle(self, modules: Modules) -> None:
        """Before a forward: do what is due and possible."""
        if modules.unsettled:
            with self._local():
                modules.settle()
            self._unhook(modules)

    def cut_off(self, modules: Modules, error: BaseException) -> None:
        """A step ended by `error`: make ready for the next. In a body of several forwards, they settle buckets too."""
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
