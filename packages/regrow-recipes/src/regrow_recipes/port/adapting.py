"""Edits scripts that use a framework's trainer: imports from regrow's adapters, and Accelerate's loop over steps.

Pure.
"""

import ast

from regrow_recipes.port.editing import Lines, Names, count_of, rename, replace, through
from regrow_recipes.port.reading import OwnLoop, ScriptText, called, is_update

_ADAPTERS = {
    "transformers": frozenset({"Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"}),
    "trl": frozenset(f"{kind}{what}" for kind in ("SFT", "DPO", "GRPO", "RLOO") for what in ("Trainer", "Config")),
    "accelerate": frozenset({"Accelerator"}),
    "lightning": frozenset({"Trainer"}),
}
_HOMES = {"pytorch_lightning": "lightning"}
"""Packages that use the adapter of another name."""
_ONCE_AN_EPOCH = frozenset({"train", "set_epoch"})
"""Calls that may also be made before each step."""

_ACCUMULATES = frozenset({"accumulate", "no_sync", "gradient_accumulation_steps", "gradient_accumulation_plugin"})


def adapted(script: ScriptText) -> str:
    """The text with its framework's imports replaced by those of regrow's adapter."""
    lines = Lines(script.text)
    changed = _wrapped(lines, script)
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            _names_from(lines, node, _package(script, node.module or ""))
        elif isinstance(node, ast.Import):
            for each in node.names:
                package = _package(script, each.name)
                if found := _used(script.tree, each.asname or each.name, package):
                    changed += [(module, f"regrow_{package}") for module in found]
                    _beside(lines, node, f"import regrow_recipes.adapters.{package} as regrow_{package}")
    # From the end of a line to its start, so that earlier positions stay valid.
    for node, text in sorted(changed, key=lambda each: -each[0].col_offset):
        replace(lines, node, text)
    return lines.text()


def untried(script: ScriptText) -> list[str]:
    """Trainers without an adapter: subclasses from other modules, and other trainers of TRL."""
    if script.framework == "accelerate":
        return []
    elsewhere = {
        each.asname or each.name
        for node in ast.walk(script.tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.name.endswith("Trainer") and each.name not in _ADAPTERS.get(_package(script, node.module or ""), ())
    }
    made = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sorted({node.func.id for node in made if isinstance(node.func, ast.Name) and node.func.id in elsewhere})


def _package(script: ScriptText, module: str) -> str:
    """Package whose adapter has the names of a module; empty: none."""
    root = module.partition(".")[0]
    package = _HOMES.get(root, root)
    if package == "accelerate" and script.framework != package:
        return ""  # a module's own class called Trainer is not the framework's
    return package if package in _ADAPTERS else ""


def _used(tree: ast.Module, bound: str, package: str) -> list[ast.expr]:
    """Uses of a module's names that its adapter has."""
    names = _ADAPTERS.get(package, frozenset())
    found = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in names]
    return [node for node in found if ast.unparse(node) == bound and node.lineno == node.end_lineno]


def _names_from(lines: Lines, node: ast.ImportFrom, package: str) -> None:
    theirs = [each for each in node.names if each.name in _ADAPTERS.get(package, ())]
    others = [each for each in node.names if each not in theirs]
    if not theirs:
        return
    pad = " " * node.col_offset
    lines.drop(node.lineno, node.end_lineno or node.lineno)
    if others:
        lines.insert(node.lineno, f"{pad}from {node.module} import {', '.join(map(ast.unparse, others))}")
    lines.insert(
        node.lineno, f"{pad}from regrow_recipes.adapters.{package} import {', '.join(map(ast.unparse, theirs))}"
    )


def _beside(lines: Lines, node: ast.stmt, line: str) -> None:
    lines.insert((node.end_lineno or node.lineno) + 1, " " * node.col_offset + line)


def _wrapped(lines: Lines, script: ScriptText) -> list[tuple[ast.expr, str]]:
    """Wrap each construction of a trainer from another module with `recoverable`."""
    names = untried(script)
    if not names:
        return []
    imports = [node for node in script.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    package = "lightning" if script.framework == "lightning" else "transformers"
    _beside(lines, imports[-1], f"from regrow_recipes.adapters.{package} import recoverable")
    made = (node.func for node in ast.walk(script.tree) if isinstance(node, ast.Call))
    return [(each, f"recoverable({each.id})") for each in made if isinstance(each, ast.Name) and each.id in names]


def accelerated(script: ScriptText, training: OwnLoop) -> str:
    """The text with Accelerate's two loops as one over steps, bodies unchanged; empty: it must be edited by hand."""
    epochs, loop = training.epochs, training.steps
    accelerator = _accelerator(script.tree)
    if epochs is None or training.call is not None or not isinstance(loop, ast.For) or not accelerator:
        return ""
    if loop not in epochs.body or not isinstance(epochs.target, ast.Name) or _gathers(script.tree):
        return ""
    at = epochs.body.index(loop)
    before, behind = epochs.body[:at], epochs.body[at + 1 :]
    given, counts = through(loop.iter)
    target: ast.expr = loop.target
    counted: list[ast.expr] = []
    if counts and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        index, target = target.elts[0], target.elts[1]
        counted = _counted(loop.body, ast.unparse(index))
        if len(counted) < _named(loop.body, ast.unparse(index)):
            return ""
    elif counts:
        return ""
    leaves = any(isinstance(node, ast.Break | ast.Continue) for each in loop.body for node in ast.walk(each))
    prelude = all(isinstance(node, ast.Expr) and called(node.value) in _ONCE_AN_EPOCH for node in before)
    if leaves or loop.orelse or not prelude or not isinstance(given, ast.Name):
        return ""
    lines = Lines(script.text)
    for number in sorted(counted, key=lambda each: -each.col_offset):
        replace(lines, number, "step.number")
    pad, deeper = " " * epochs.col_offset, " " * loop.col_offset
    first = _first(epochs)
    rename(lines, epochs.body[0].lineno, epochs.end_lineno or 0, Names(epochs.target.id, first), f"{accelerator}.epoch")
    for node in before:
        if isinstance(node, ast.Expr) and called(node.value) == "set_epoch":
            lines.drop(node.lineno, node.end_lineno or node.lineno)  # regrow does this itself
    head = f"{pad}for step in {accelerator}.steps({given.id}, epochs={count_of(epochs)}):\n"
    lines.drop(epochs.lineno, epochs.iter.end_lineno or epochs.lineno)
    lines[epochs.lineno] = head
    entered = ast.unparse(target)
    entered = f"({entered})" if isinstance(target, ast.Tuple) and not entered.startswith("(") else entered
    lines.drop(loop.lineno, loop.iter.end_lineno or loop.lineno)
    lines[loop.lineno] = f"{deeper}with step as {entered}:\n"
    if behind:
        lines.insert(behind[0].lineno, f"{deeper}if not {accelerator}.ends_epoch(step):")
        lines.insert(behind[0].lineno, f"{deeper}    continue")
    return lines.text()


def _accelerator(tree: ast.Module) -> str:
    """Name of the script's Accelerator."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and called(node.value) == "Accelerator"
            and isinstance(node.targets[0], ast.Name)
        ):
            return node.targets[0].id
    return ""


def _gathers(tree: ast.Module) -> bool:
    """True if gradients are accumulated over several batches."""
    given = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    calls = {called(node) for node in ast.walk(tree)}
    return not given.isdisjoint(_ACCUMULATES) or not calls.isdisjoint(_ACCUMULATES)


def _named(body: list[ast.stmt], name: str) -> int:
    """Number of uses of a name."""
    return sum(isinstance(node, ast.Name) and node.id == name for each in body for node in ast.walk(each))


def _counted(body: list[ast.stmt], name: str) -> list[ast.expr]:
    """Uses of the batch's number in a condition of an update, `if step % n == 0`, where n is a variable, mostly 1."""
    tests = [
        node.test
        for each in body
        for node in ast.walk(each)
        if isinstance(node, ast.If) and any(map(is_update, ast.walk(node)))
    ]
    divided = [node for test in tests for node in ast.walk(test) if isinstance(node, ast.BinOp)]
    asked = [node.left for node in divided if isinstance(node.op, ast.Mod) and isinstance(node.right, ast.Name)]
    return [node for each in asked for node in ast.walk(each) if isinstance(node, ast.Name) and node.id == name]


def _first(epochs: ast.For) -> int:
    arguments = epochs.iter.args if isinstance(epochs.iter, ast.Call) else []
    first = arguments[0] if len(arguments) > 1 else None
    return first.value if isinstance(first, ast.Constant) and type(first.value) is int else 0
