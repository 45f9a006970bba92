"""As `private_names`, of frameworks that were read and not run; their adapters were run against stand-ins alone.

torchtitan: `Trainer.init_distributed`, `forward_backward_step`, `train_step`, and what these use of `self`;
`distributed.utils.clip_grad_norm_`.
megatron.core: `step_with_ready_grads` of an optimizer, its `model_chunks`, `gbuf_ranges`,
`_get_main_param_and_optimizer_states` and `_copy_main_params_to_model_params`; `start_param_sync` of a model chunk.
"""

import contextlib
import functools
import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

READ = {"torchtitan": "003fe28 and b5bcd76", "megatron.core": "d98e8a6"}
"""The commits of each."""
_log = logging.getLogger("regrow")


@functools.cache
def tell_untested(name: str) -> None:
    """Say once that an adapter was never run on its framework."""
    _log.warning(
        "regrow's adapter of %s was written by reading it at %s and has not been run on it: compare a short run with "
        "kills and one without (regrow try) before you trust it",
        name,
        READ[name],
    )


# --- torchtitan -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def group_is_there() -> Iterator[None]:
    """Within this, `init_process_group` does nothing: the session has made the group."""
    theirs = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda *_, **__: None
    try:
        yield
    finally:
        torch.distributed.init_process_group = theirs


@contextlib.contextmanager
def hearing_norms(trainer: Any) -> Iterator[list[Any]]:
    """The norms of gradients that torchtitan clips within this."""
    kinds = [kind.__module__ for kind in type(trainer).__mro__]
    root = next((name for name in kinds if name.partition(".")[0] == "torchtitan"), "torchtitan").partition(".")[0]
    utils: Any = importlib.import_module(f"{root}.distributed.utils")
    theirs, norms = utils.clip_grad_norm_, list[Any]()

    def clip(*args: Any, **kwargs: Any) -> Any:
        norms.append(theirs(*args, **kwargs))
        return norms[-1]

    utils.clip_grad_norm_ = clip
    try:
        yield norms
    finally:
        utils.clip_grad_norm_ = theirs


# --- megatron -------------------------------------------------------------------------------------------------------


def sharding_optimizers(optimizer: Any) -> list[Any]:
    """The distributed optimizers in one of Megatron's, which may be a chain."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def on_ready_gradients(optimizer: Any, before: Any) -> None:
    """Call `before` where gradients are reduced and clipped; parameters are not gathered behind the update."""
    theirs = optimizer.step_with_ready_grads

    def step() -> Any:
        before()
        chunks, optimizer.model_chunks = getattr(optimizer, "model_chunks", []), []
        try:
            return theirs()
        finally:
            optimizer.model_chunks = chunks

    optimizer.step_with_ready_grads = step


def gather_parameters(optimizer: Any, model: list[Any]) -> None:
    """Model parameters are those of the optimizers' shards, on all ranks."""
    for each in sharding_optimizers(optimizer):
        each._copy_main_params_to_model_params()
    for chunk in model:
        chunk.start_param_sync(force_sync=True)


def shards(optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's pieces of the weights, `param`, with their moments, by where they lie."""
    found = {}
    for place, each, parameter in _places(optimizer):
        found[place] = dict(each._get_main_param_and_optimizer_states(parameter))
    return found


def put_shards(optimizer: Any, pieces: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """The reverse: weights in place; moments that were not received are forgotten, as before the first update."""
    for place, each, parameter in _places(optimizer):
        main, received = each._get_main_param_and_optimizer_states(parameter)["param"], dict(pieces[place])
        main.data.copy_(received.pop("param"))
        state = each.optimizer.state[main]
        for name in state.keys() - received.keys():
            del state[name]
        for name, tensor in received.items():
            if name in state:
                state[name].copy_(tensor)
            else:
                state[name] = tensor.to(main.device if tensor.dim() else tensor.device, copy=True)


def _places(optimizer: Any) -> Iterator[tuple[str, Any, Any]]:
    for at, each in enumerate(sharding_optimizers(optimizer)):
        for buffer, buckets in enumerate(each.gbuf_ranges):
            for kind, ranges in buckets.items():
                for bucket, held in enumerate(ranges):
                    for number, (parameter, where) in enumerate(held["param_map"].items()):
                        piece = where["param"]
                        yield f"{at}.{buffer}.{kind}.{bucket}.{number}[{piece.start}:{piece.end}]", each, parameter
