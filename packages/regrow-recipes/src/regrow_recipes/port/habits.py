"""Finds listed habits in a script, which are refused, must be changed by hand, or need a note. Pure."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from regrow_recipes.port.reading import COLLECTIVES, FIRST_FORM, ScriptText, called, is_update, names_of, own

_RANK = re.compile(r"(int\()?([\w.]*\bget_rank\(\)|os\.(environ|getenv)\W.*'RANK'.*?)\)?")
_SPAWNS = ("spawn", "start_processes")
_SERVED = ("None", "gloo", "nccl", "regrow", "dist.Backend.GLOO", "dist.Backend.NCCL")


class Habit(NamedTuple):
    """One finding. `stops`: the loop must be changed by hand first."""

    line: int
    what: str
    stops: bool = False


def habits(script: ScriptText) -> list[Habit]:
    """All findings, in the order of the text."""
    found = [*_anywhere(script.tree), *(_in_loop(script) if script.training is not None else ())]
    return sorted(dict.fromkeys(found))


def _anywhere(tree: ast.Module) -> Iterator[Habit]:
    first_form = names_of(tree, FIRST_FORM)
    for node in ast.walk(tree):
        name = called(node)
        line = getattr(node, "lineno", 0)
        options = {each.arg: ast.unparse(each.value) for each in node.keywords} if isinstance(node, ast.Call) else {}
        if options.get("static_graph") == "True":
            yield Habit(line, "DDP(static_graph=True) cannot run a step again: leave it out")
        if name == "ZeroRedundancyOptimizer":
            yield Habit(
                line, "ZeroRedundancyOptimizer keeps each part of the state on one rank only: use FSDP2, or AdamW"
            )
        if name in first_form:
            yield Habit(line, f"{FIRST_FORM} is refused: shard by its second form, fully_shard", stops=True)
        if name == "new_group" and options.get("backend", "None").strip("'\"") not in _SERVED:
            yield Habit(line, "a group with a backend other than gloo or NCCL is refused: leave backend= out")
        if name in _SPAWNS and isinstance(node, ast.Call) and node.args:
            what = (
                f"{name} starts the ranks, which regrow run does: call {ast.unparse(node.args[0])} in its place, with "
            )
            yield Habit(line, f"{what}int(os.environ['LOCAL_RANK']) as its first argument", stops=True)
        if name == "powerSGD_hook":
            yield Habit(line, "PowerSGD keeps a state that every step changes and regrow cannot undo: leave it out")
        if name in ("islice", "zip_longest"):
            yield Habit(
                line,
                f"{name} must not limit the batches that regrow gives: session.epochs(..., length=n) makes epochs "
                f"shorter",
            )
    for node in own(tree):
        yield from _rank_at_top(node)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in own(function):
            yield from _rank_at_top(node)


def _rank_at_top(node: ast.AST) -> Iterator[Habit]:
    """Find a variable of the script or a function that keeps the rank."""
    if not isinstance(node, ast.Assign):
        return
    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
    if any(_RANK.fullmatch(ast.unparse(each)) for each in values):
        yield Habit(
            node.lineno,
            f"`{ast.unparse(node.targets[0])}` keeps the rank of the start: this works, but standbys are then built "
            f"only when they are needed; with session.is_main, read where it is used, they are ready in advance",
        )


def _in_loop(script: ScriptText) -> Iterator[Habit]:
    training = script.training
    if training is None:
        return
    loop = training.steps
    if isinstance(loop, ast.While):
        yield Habit(
            loop.lineno,
            "a `while` loop: write `for step in session.steps(batch_of, until=...)`, batch_of(step)",
            stops=True,
        )
    elif not _loader(loop):
        yield Habit(
            loop.lineno,
            "its batches do not come from a loader: write `for step in session.steps(batch_of, until=...)`, where "
            "batch_of(step) gives the batch of a step",
            stops=True,
        )
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and "%" in ast.unparse(node.test) and any(map(is_update, ast.walk(node))):
            gathering = (
                f"if `{ast.unparse(node.test)}` skips the update of some batches (a divisor above 1 does), give "
                f"Accelerator(gradient_accumulation_steps=n), and loop with `for batch in "
                "accelerator.batches(micros)` in the step: docs/adopt.md"
                if script.framework == "accelerate"
                else "gradients are accumulated over several batches: a step is one update, so give microbatches=, "
                "and loop with `for micro in step.microbatches` in it"
            )
            yield Habit(node.lineno, gathering, stops=True)
    updates = [node.lineno for node in ast.walk(loop) if isinstance(node, ast.Call) and is_update(node)]
    for node in _of_this_loop(loop):
        if isinstance(node, ast.Break) and node.lineno < max(updates, default=0):
            what = "`break` before the update would leave a step that has begun: "
            yield Habit(
                node.lineno, f"{what}session.epochs(..., length=n) makes epochs shorter, until= trainings", stops=True
            )
        elif isinstance(node, ast.Break):
            what = "`break` may end an epoch before its end: session.epochs(..., length=n) makes epochs shorter"
            yield Habit(loop.lineno, what)
    yield from _around(script)
    yield from _behind_update(loop)
    yield from _written_by_one(script)
    if training.epochs is None and training.inside is not script.tree and not isinstance(loop, ast.While):
        yield Habit(
            loop.lineno,
            "no loop of epochs was found around it: `until=` must be the number of steps of the whole training",
        )


def _loader(loop: ast.For) -> str:
    """Iterable of the loop without `enumerate` and `tqdm`; empty if it is a range."""
    given: ast.expr = loop.iter
    while isinstance(given, ast.Call) and given.args and called(given) in ("enumerate", "tqdm", "trange", "track"):
        given = given.args[0]
    return "" if called(given) == "range" else ast.unparse(given)


def _of_this_loop(loop: ast.AST) -> Iterator[ast.AST]:
    """Nodes of the loop without those of inner loops."""
    for child in ast.iter_child_nodes(loop):
        yield child
        if not isinstance(child, ast.For | ast.While | ast.FunctionDef):
            yield from _of_this_loop(child)


def _around(script: ScriptText) -> Iterator[Habit]:
    """Habits at the start of the loop of epochs, and of the job."""
    epochs = script.training.epochs if script.training is not None else None
    arguments = epochs.iter.args if epochs is not None and isinstance(epochs.iter, ast.Call) else []
    if epochs is not None and len(arguments) > 1 and not isinstance(arguments[0], ast.Constant):
        what = f"`{ast.unparse(arguments[0])}`: start at the first epoch; --resume continues at the right one"
        yield Habit(epochs.lineno, f"{what}; leave out the code that loads a checkpoint to continue")
    for function in (node for node in ast.walk(script.tree) if isinstance(node, ast.FunctionDef)):
        for node in own(function):
            if isinstance(node, ast.Expr) and called(node.value) == "init_process_group" and node not in function.body:
                yield Habit(
                    node.lineno,
                    "regrow.init(), which replaces it, must be called in any case: move it out of the branch",
                )


def _written_by_one(script: ScriptText) -> Iterator[Habit]:
    around = script.training.epochs if script.training is not None else None
    for node in ast.walk(around) if around is not None else ():
        if isinstance(node, ast.If) and ("rank" in ast.unparse(node.test) or "is_main" in ast.unparse(node.test)):
            saves = [each for each in ast.walk(node) if called(each) in ("save", "save_pretrained")]
            if saves:
                yield Habit(
                    node.lineno,
                    "a file that one rank writes after an epoch is missing if that rank dies just then: "
                    "docs/epochs.md shows a function that all ranks wait for",
                )


def _behind_update(loop: ast.AST) -> Iterator[Habit]:
    updates = [node.lineno for node in ast.walk(loop) if isinstance(node, ast.Call) and is_update(node)]
    for node in ast.walk(loop):
        if isinstance(node, ast.Call) and called(node) in COLLECTIVES and node.lineno > max(updates, default=1 << 30):
            yield Habit(
                node.lineno,
                f"{called(node)} after the update: in the body that costs a copy of the state in each step; before "
                "the update, or after `with`, it costs nothing",
            )
