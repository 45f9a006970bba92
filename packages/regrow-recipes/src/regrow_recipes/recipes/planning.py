"""Plans a training from a model, a recipe and a world: shards, micro-batches, memory, cost of recovery. *Pure*."""

from typing import Final

import msgspec

from regrow.core.errors import UsageError
from regrow_recipes.recipes.facts import ModelFacts
from regrow_recipes.recipes.schema import TrainingRecipe

_TRAINED: Final = 16
"""Bytes of a trained parameter: weight, gradient and AdamW's two moments, in float32."""
_GATHERED: Final = 2.5
"""Layers that FSDP holds unsharded at once: the present one, the next one, and gradients in flight."""
_ACTIVATIONS: Final = 34
"""Bytes in half precision of a token, layer and hidden unit (Korthikanti et al. 2022, without the scores)."""
_LOGITS: Final = 10
"""Bytes of a token and vocabulary entry: logits and their gradient."""
_ROOM: Final = 0.9
"""Share of the memory to plan with: the rest is for fragmentation and for libraries."""
_LARGE: Final = 1_000_000_000
_MOST_MICRO: Final = 8
_UNKNOWN: Final = 1_000_000_000
"""Bytes of a micro-batch's activations if the device's memory is not known."""
_COPIES: Final = 10
"""Steps between two copies of the state, if there is no replica."""


class PlanWorld(msgspec.Struct, frozen=True):
    """Hardware to train on.

    Attributes:
        ranks: initial world size.
        memory: bytes of each rank's device; None: unlimited.
        half: whether the forward pass is in bf16.
    """

    ranks: int
    memory: int | None = None
    half: bool = False


class MemoryParts(msgspec.Struct, frozen=True):
    """Bytes on each rank's device, by use."""

    weights: float
    training: float
    """Gradients and moments, and the float32 weights of trained parameters."""
    gathered: float
    activations: float
    logits: float

    @property
    def state(self) -> float:
        """Bytes of the protected state, which excludes gradients."""
        return self.weights + self.training * 0.75

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return self.weights + self.training + self.gathered + self.activations + self.logits


class RecipePlan(msgspec.Struct, frozen=True):
    """The planner's choice."""

    shard: int
    replicas: int
    micro: int
    microbatches: int
    rows: int
    recompute: bool
    memory: MemoryParts
    notes: list[str]
    buddy_every: int = 0


def plan(facts: ModelFacts, recipe: TrainingRecipe, world: PlanWorld) -> RecipePlan:
    """Choose the smallest shard that fits, and then as many replicas as possible: replicas recover without copies.

    Raises:
        UsageError: no shard fits, or a step has too few rows for the world.
    """
    recompute = recipe.parallel.recompute
    recomputes = facts.parameters >= _LARGE if recompute == "auto" else recompute
    shard = _shard(facts, recipe, world, recomputes=recomputes)
    replicas = world.ranks // shard
    most = max(replicas, int(recipe.elastic.replicas.split(":")[1])) if recipe.elastic.replicas else replicas
    notes: list[str] = []
    wanted = wanted_rows(recipe)
    if wanted < most * shard:
        raise UsageError(
            f"a step has {wanted} rows for {most} replicas of {shard} ranks",
            hint=f"give batch.samples={most * shard} or more, or fewer ranks",
        )
    micro = _micro(facts, recipe, world, shard, wanted // (most * shard), recomputes=recomputes)
    microbatches = _microbatches(wanted, shard, micro)
    rows = microbatches * shard * micro
    if rows != wanted:
        notes.append(f"a step has {rows} rows instead of {wanted}: whole micro-batches of {shard * micro}")
    buddy = _COPIES if replicas == 1 and shard > 1 else 0
    if buddy:
        notes.append(f"one replica: its state is copied to host memory each {buddy} steps (--buddy-every {buddy})")
    memory = memory_parts(facts, recipe, shard, micro, half=world.half, recomputes=recomputes)
    return RecipePlan(shard, replicas, micro, microbatches, rows, recomputes, memory, notes, buddy)


def plan_rollouts(facts: ModelFacts, recipe: TrainingRecipe, world: PlanWorld) -> RecipePlan:
    """As `plan`, for a training that generates: each rank has the whole model and an equal share of the completions.

    Raises:
        UsageError: the model does not fit on a rank, or the completions cannot be divided evenly.
    """
    whole = msgspec.structs.replace(recipe, parallel=msgspec.structs.replace(recipe.parallel, shard=1))
    planned, samples = plan(facts, whole, world), recipe.batch.samples
    if planned.rows != samples or planned.microbatches % world.ranks:
        raise UsageError(
            f"batch.samples = {samples} completions do not divide into forwards of {planned.micro} on {world.ranks} "
            f"ranks",
            hint="give a multiple of ranks times batch.micro",
        )
    if world.memory is not None and planned.memory.total > _ROOM * world.memory:
        raise UsageError(
            f"the model does not fit: each rank needs {in_bytes(planned.memory.total)} of {in_bytes(world.memory)}",
            hint='grpo.weights = "adapter", a smaller batch.micro or data.length, or parallel.recompute = true',
        )
    return planned


def memory_parts(
    facts: ModelFacts, recipe: TrainingRecipe, shard: int, micro: int, *, half: bool, recomputes: bool
) -> MemoryParts:
    """Bytes on a rank that holds `1 / shard` of the model."""
    number = 2 if half else 4
    whole = facts.parameters / shard
    if recipe.adapts:
        adapter = facts.adapter_parameters(facts.targets(recipe.lora.targets), recipe.lora.rank) / shard
        weights, training = number * whole, _TRAINED * adapter
    else:
        weights, training = 0.0, _TRAINED * whole
    # Trained weights are float32; the forward pass uses them in bf16, gathered or (DDP) one layer at a time.
    gathered = number * _GATHERED * facts.largest_layer if shard > 1 else 0.0
    tokens = micro * recipe.data.length * (2 if recipe.method == "dpo" else 1)
    a_layer = tokens * facts.hidden * _ACTIVATIONS * number / 2
    kept = tokens * facts.hidden * number * len(facts.layers)
    activations = a_layer + kept if recomputes else a_layer * len(facts.layers)
    return MemoryParts(weights, training, gathered, activations, float(tokens * facts.vocabulary * _LOGITS))


def _fits(
    facts: ModelFacts, recipe: TrainingRecipe, world: PlanWorld, shard: int, micro: int, *, recomputes: bool
) -> bool:
    parts = memory_parts(facts, recipe, shard, micro, half=world.half, recomputes=recomputes)
    return world.memory is None or parts.total <= _ROOM * world.memory


def _shard(facts: ModelFacts, recipe: TrainingRecipe, world: PlanWorld, *, recomputes: bool) -> int:
    pinned = recipe.parallel.shard
    micro = 1 if recipe.batch.micro == "auto" else recipe.batch.micro
    if pinned != "auto":
        if world.ranks % pinned:
            raise UsageError(
                f"parallel.shard = {pinned} does not divide {world.ranks} ranks",
                hint="start a multiple of it, or leave parallel.shard out",
            )
        return pinned
    for shard in (size for size in range(1, world.ranks + 1) if world.ranks % size == 0):
        if _fits(facts, recipe, world, shard, micro, recomputes=recomputes):
            return shard
    parts = memory_parts(facts, recipe, world.ranks, micro, half=world.half, recomputes=recomputes)
    raise UsageError(
        f"the model does not fit: over {world.ranks} ranks each needs {in_bytes(parts.total)} of "
        f"{in_bytes(world.memory or 0)}",
        hint="more ranks, a smaller data.length, parallel.recompute=true, or method lora",
    )


def _micro(
    facts: ModelFacts, recipe: TrainingRecipe, world: PlanWorld, shard: int, most: int, *, recomputes: bool
) -> int:
    pinned = recipe.batch.micro
    if pinned != "auto":
        if pinned > most:
            raise UsageError(
                f"batch.micro = {pinned}, but a step has only {most} rows for each rank",
                hint="give a smaller one, or a larger batch",
            )
        return pinned
    rows, replicas = wanted_rows(recipe), world.ranks // shard

    def price(size: int) -> tuple[int, int, int]:
        """Rows beyond the requested ones, then rows of the busiest replica: a larger micro-batch must not add any."""
        number = _microbatches(rows, shard, size)
        return abs(number * shard * size - rows), -(-number // replicas) * size, -size

    def fits(size: int) -> bool:
        if world.memory is not None:
            return _fits(facts, recipe, world, shard, size, recomputes=recomputes)
        parts = memory_parts(facts, recipe, shard, size, half=world.half, recomputes=recomputes)
        return parts.activations + parts.logits <= _UNKNOWN

    return min(filter(fits, range(1, min(most, _MOST_MICRO) + 1)), key=price, default=1)


def wanted_rows(recipe: TrainingRecipe) -> int:
    """Rows of a step, as requested."""
    return recipe.batch.samples or recipe.batch.tokens // recipe.data.length


def _microbatches(rows: int, shard: int, micro: int) -> int:
    return round(rows / (shard * micro))


def recovery_costs(planned: RecipePlan) -> list[tuple[str, str]]:
    """Cost of readiness for faults, by flag: bytes of one copy of the state, and its place."""
    state, twice = in_bytes(planned.memory.state), in_bytes(2 * planned.memory.state)
    return [
        (
            "replicas",
            "nothing: a lost rank gets its state from another replica"
            if planned.replicas > 1
            else "there is only one replica",
        ),
        ("--standby 1", f"{state} of a device's memory"),
        ("--digest-every N", f"{state} of each device's memory"),
        ("--buddy-every K", f"{twice} of host memory for each rank"),
        ("--checkpoint-dir DIR", f"{state} of host memory for each rank, while one is written"),
    ]


def in_bytes(number: float) -> str:
    """Format 128,600,000,000 as 128.6 GB."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"


def steps_of(recipe: TrainingRecipe, rows_there_are: int, rows_a_step: int) -> int:
    """Number of updates of the training. Raises `UsageError` if the data is too little for one update."""
    if rows_there_are < 1:
        raise UsageError("there is no row to train on", hint="see `regrow recipes check`, and data.length")
    if recipe.train.steps:
        return recipe.train.steps
    return max(1, round(recipe.train.epochs * rows_there_are / rows_a_step))
