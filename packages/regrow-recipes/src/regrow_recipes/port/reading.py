"""Finds the training in a script's text: a framework's trainer, or the script's loops and their objects. Pure."""

import ast
import io
from collections.abc import Iterator
from dataclasses import dataclass, field

from regrow.core.errors import UsageError
from regrow.core.process.own_code import is_own_name

WRAPPERS = frozenset({"DDP", "DistributedDataParallel", "fully_shard"})
FIRST_FORM = "FullyShardedDataParallel"
"""The first version of FSDP, which is refused."""
COLLECTIVES = frozenset(
    {"all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast"}
)
FRAMEWORKS = {
    "transformers": frozenset({"Trainer", "Seq2SeqTrainer"}),
    "trl": frozenset({"SFTTrainer", "DPOTrainer", "GRPOTrainer", "RLOOTrainer"}),
    "accelerate": frozenset({"Accelerator"}),
    "lightning": frozenset({"Trainer", "Fabric"}),
    "pytorch_lightning": frozenset({"Trainer"}),
}
"""Names in a framework that run their own loop."""
_KEPT = (("Scaler",), ("LR", "Scheduler", "Restarts", "Plateau"), ("AveragedModel", "EMA", "ExponentialMovingAverage"))
Loop = ast.For | ast.While
Function = ast.FunctionDef | ast.Module


@dataclass
class OwnLoop:
    """A training loop of the script.

    Attributes:
        steps: the loop with one update per iteration.
        inside: the function or module that contains it.
        epochs: the loop around it, if there is one.
        around: the function or module that contains `epochs`; not `inside` if it calls that.
        call: the call of `inside` there.
        protected: variables that must survive; empty if the model or its optimizer was not found.
    """

    steps: Loop
    inside: Function
    epochs: ast.For | None = None
    around: Function | None = None
    call: ast.Call | None = None
    protected: list[str] = field(default_factory=list)


@dataclass
class ScriptText:
    """The findings in a script's text.

    Attributes:
        tree: the parsed text.
        framework: the framework of its trainer; empty: none.
        wrapped: the parallel wrapper of its model; empty: none.
        training: its training loop, if it has one.
    """

    text: str
    tree: ast.Module
    framework: str = ""
    wrapped: str = ""
    training: OwnLoop | None = None


def read(text: str, name: str) -> ScriptText:
    """Find the training. Raises `UsageError` if the text is not valid Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        where = f"{name}, line {line}" if line else name
        raise UsageError(f"{where} is not Python: {error}", hint="give the script that torchrun would run") from error
    script = ScriptText(text, tree, framework=_framework(tree))
    names = [called(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    script.wrapped = next((each for each in names if each in WRAPPERS), "")
    if names_of(tree, FIRST_FORM) & set(names):
        script.wrapped = FIRST_FORM
    script.training = _training(tree)
    return script


def lines_of(text: str) -> list[str]:
    """The lines of a script with their line ends, as Python counts them; `splitlines` also splits at form feeds."""
    return io.StringIO(text, newline="").readlines()


def called(node: ast.AST) -> str:
    """The name of the called function without its prefix; empty for anything else than a call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def updates_somewhere(tree: ast.Module) -> bool:
    """True if an optimizer steps anywhere."""
    return _updates(tree)


def uses_regrow(tree: ast.Module) -> bool:
    """True if a script already uses regrow."""
    return any(is_own_name(name) for name, _ in imported(tree))


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of each import; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, each.name) for each in node.names)


def names_of(tree: ast.Module, imported_as: str) -> frozenset[str]:
    """Names under which a text imports `imported_as`."""
    return frozenset(
        each.asname or each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name == imported_as
    ) | {imported_as}


def _framework(tree: ast.Module) -> str:
    for module, name in imported(tree):
        package = module.partition(".")[0]
        trains = FRAMEWORKS.get(package, frozenset())
        if name in trains or (not name and trains and _has_attribute(tree, trains)):
            return "lightning" if package == "pytorch_lightning" else package
        if package == "trl" and name.endswith("Trainer"):
            return package
    arguments = any(name.endswith("TrainingArguments") for _, name in imported(tree))
    trainer = any(called(node).endswith("Trainer") for node in ast.walk(tree))
    return "transformers" if arguments and trainer else ""


def _has_attribute(tree: ast.Module, names: frozenset[str]) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(tree))


def _training(tree: ast.Module) -> OwnLoop | None:
    functions: list[Function] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for inside in [*functions, tree]:
        loops = [node for node in own(inside) if isinstance(node, ast.For | ast.While) and _updates(node)]
        if not loops:
            continue
        steps = loops[-1]  # the innermost: `own` yields outer nodes first
        training = OwnLoop(steps, inside)
        around = [node for node in loops[:-1] if isinstance(node, ast.For)]
        if around:
            training.epochs, training.around = around[-1], inside
        elif isinstance(inside, ast.FunctionDef):
            _look_for_caller(tree, functions, inside, training)
        training.protected = _protected(training.around or inside, tree)
        return training
    return None


def _look_for_caller(tree: ast.Module, functions: list[Function], inside: ast.FunctionDef, training: OwnLoop) -> None:
    for around in [*functions, tree]:
        for loop in (node for node in own(around) if isinstance(node, ast.For)):
            for node in ast.walk(loop):
                if isinstance(node, ast.Call) and called(node) == inside.name:
                    training.epochs, training.around, training.call = loop, around, node
                    return


def own(inside: Function) -> Iterator[ast.AST]:
    """The statements and expressions of a function, outer ones first, without those of inner functions."""
    ahead: list[ast.AST] = list(inside.body)
    while ahead:
        node = ahead.pop(0)
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            ahead += ast.iter_child_nodes(node)


def is_update(node: ast.AST) -> bool:
    """True if this is the step of an optimizer: `optimizer.step()`, `scaler.step(optimizer)`."""
    if called(node) != "step" or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = ast.unparse(node.func.value).lower()
    return "opt" in owner or "scaler" in owner


def _updates(loop: ast.AST) -> bool:
    return any(map(is_update, ast.walk(loop)))


def _protected(around: Function, tree: ast.Module) -> list[str]:
    """Models, optimizers and related objects: variables of the function around the loop, or of the module."""
    assigned: dict[str, ast.expr] = {}
    for node in [*own(around), *(own(tree) if around is not tree else ())]:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, node.value)
            if called(node.value) in WRAPPERS:
                assigned[node.targets[0].id] = node.value
    optimizers = [name for name, value in assigned.items() if _is_optimizer(value)]
    models = [name for name, value in assigned.items() if called(value) in WRAPPERS]
    if not models:
        models = [
            owner
            for name in optimizers
            for node in ast.walk(assigned[name])
            if called(node) == "parameters" and (owner := _owner(node)) in assigned
        ]
    if not models or not optimizers:
        return []
    kept = [name for ends in _KEPT for name, value in assigned.items() if called(value).endswith(ends)]
    return list(dict.fromkeys([*models, *optimizers, *kept]))


def _is_optimizer(value: ast.expr) -> bool:
    """True for the construction of an optimizer: it takes parameters, and is no wrapper or helper."""
    name = called(value)
    given = [*value.args, *(each.value for each in value.keywords)] if isinstance(value, ast.Call) else []
    takes = any(called(node) in ("parameters", "named_parameters") for each in given for node in ast.walk(each))
    return name[:1].isupper() and takes


def _owner(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
