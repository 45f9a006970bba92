"""Detects changes of protected state: by versions at every step, by digests while changes are being learnt.

Versions cost microseconds, but `parameter.data.mul_(...)` and some kernels do not count them.
"""

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from regrow.hydration.shards import local
from regrow.train.graphs.nested import large_arrays, large_tensors
from regrow.train.graphs.object_graph import ObjectGraph
from regrow.train.state.audit import Look
from regrow.train.state.device_digest import digest_on_device
from regrow.train.state.moment import Scope
from regrow.train.state.naming import ProtectedObjects
from regrow.train.values.arrays import flat_bytes

_SAMPLED = 16
"""Number of elements sampled from a parameter, to see if it now contains another one's values."""
_AT_MOST = 2.0
"""Bound for parameters that no optimizer has (an average, a teacher, a frozen base): they are copied and digested only
if their bytes are at most this factor of those that an optimizer has."""


class Looker:
    """Looks at protected state for changes.

    Args:
        protected: the protected objects.
    """

    def __init__(self, protected: ProtectedObjects) -> None:
        self._roster = protected
        self._keepers: list[str] | None = None

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Every protected parameter, by its full name."""
        return self._roster.parameters

    def look(self, *, closely: bool = False) -> Look:
        """A token for each parameter, and each object that has large tensors or arrays in its state.

        Args:
            closely: compute digests, which costs a pass over all parameters.
        """
        seen: dict[str, object] = {}
        digested = self._worthwhile() if closely else frozenset()
        if closely:
            self._roster.late.come_behind()
        for name, parameter in self._roster.parameters.items():
            if name in digested:
                seen[name] = _digest(parameter)
            elif type(parameter) is not nn.Parameter and isinstance(parameter, DTensor):
                seen[name] = parameter._version
            else:
                seen[name] = (parameter._version, parameter.data_ptr())
        if self._keepers is None or closely:
            self._keepers = [
                name
                for name, thing in self._roster.objects.items()
                if not isinstance(thing, ObjectGraph)  # a graph is copied each time
                and (large_tensors(held := thing.state_dict()) or large_arrays(held))
            ]
        for name in self._keepers:
            state = self._roster.objects[name].state_dict()
            tensors = large_tensors(state)
            if closely:
                arrays = [xxhash.xxh3_64_intdigest(array.tobytes()) for array in large_arrays(state)]
                seen[name] = ([_digest(tensor) for tensor in tensors], arrays)
            else:
                seen[name] = [(tensor._version, tensor.data_ptr()) for tensor in tensors]
        return seen

    def sample(self) -> Look:
        """A few elements of each parameter: enough to see that the weights were exchanged for others."""
        return {name: _first(parameter) for name, parameter in self._roster.parameters.items()}

    def scope_of(self, names: frozenset[str]) -> Scope:
        """The scope of the parameters and objects with these names."""
        return Scope(names & self._roster.parameters.keys(), names & self._roster.objects.keys())

    def likely(self) -> Scope:
        """Scope to copy if nothing is known yet: objects, and tensors that no optimizer updates."""
        return Scope(self._worthwhile() - self._owned(), frozenset(self._roster.objects))

    def large(self) -> Scope:
        """All objects, and the parameters worth comparing; for copies in host memory."""
        return Scope(self._worthwhile(), frozenset(self._roster.objects), host=True)

    def _owned(self) -> frozenset[str]:
        owned = {id(parameter) for short in self._roster.optimized.values() for parameter in short.values()}
        return frozenset(name for name, parameter in self._roster.parameters.items() if id(parameter) in owned)

    def _worthwhile(self) -> frozenset[str]:
        """All parameters; without those that no optimizer has, if they are much larger than the others."""
        parameters, owned = self._roster.parameters, self._owned()
        mine = sum(local(parameters[name]).nbytes for name in owned)
        others = sum(local(parameter).nbytes for name, parameter in parameters.items() if name not in owned)
        return frozenset(parameters) if not owned or others <= _AT_MOST * mine else owned


def _digest(tensor: torch.Tensor) -> int:
    here = local(tensor)
    if here.device.type != "cpu" and here.is_contiguous():
        return digest_on_device(here)
    return xxhash.xxh3_64_intdigest(flat_bytes(here).numpy().data)


def _first(parameter: torch.Tensor) -> bytes:
    here = local(parameter).detach()
    few = here.as_strided((min(_SAMPLED, here.numel()),), (1,))
    return flat_bytes(few).numpy().tobytes()
