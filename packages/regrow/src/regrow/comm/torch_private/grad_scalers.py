"""State of an aborted step that a `GradScaler` keeps outside its `state_dict`, in itself and in optimizers."""

from collections.abc import Iterable

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


def begin_anew(objects: Iterable[object]) -> None:
    """Make the protected scalers and optimizers forget that an aborted body has called `unscale_` or `step`."""
    for thing in objects:
        if isinstance(thing, GradScaler) and thing.is_enabled():  # a disabled scaler has no such state
            # A field of torch's own, with the same name since 1.6; `update()` empties it too.
            thing._per_optimizer_states.clear()
        elif isinstance(thing, Optimizer) and getattr(thing, "_step_supports_amp_scaling", False):
            # The scaler sets it around `step`, which was cut off: the next scale would be multiplied by this value.
            for name in ("grad_scale", "found_inf"):
                vars(thing).pop(name, None)
