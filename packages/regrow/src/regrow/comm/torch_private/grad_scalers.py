"""State that a `GradScaler` keeps outside its `state_dict`: each optimizer's stage in a step that was given up."""

from collections.abc import Iterable

from torch.amp.grad_scaler import GradScaler


def begin_anew(objects: Iterable[object]) -> None:
    """Let the scalers among what is protected forget `unscale_` and `step` of a body that runs again."""
    for thing in objects:
        if isinstance(thing, GradScaler) and thing.is_enabled():  # else it has no such thing
            # Of torch's own, by the same name since 1.6: after `update()` it is empty too.
            thing._per_optimizer_states.clear()
