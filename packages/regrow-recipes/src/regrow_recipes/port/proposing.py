"""Reports on a script: the tier that it has today, the lines to change, and notes. Pure."""

import ast
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from regrow.core.errors import UsageError
from regrow_recipes.port.adapting import accelerated, adapted, untried
from regrow_recipes.port.editing import looped
from regrow_recipes.port.habits import habits
from regrow_recipes.port.reading import ScriptText, called, lines_of, read, updates_somewhere, uses_regrow

_TRY = "then: regrow try --nproc-per-node 2 {name}, which kills each rank in each phase and compares"
_BY_HAND = (
    "its import changes to regrow_recipes.adapters.accelerate, and its two loops become one of steps, `for step in "
    "accelerator.steps(loader, epochs=n)`, by hand, since it accumulates gradients or has more in its loop of epochs: "
    "docs/adopt.md"
)
_REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor"})
_FABRIC = "Fabric's loops are like plain ones: session.epochs, docs/epochs.md"


@dataclass
class Proposal:
    """Proposal for a script.

    Attributes:
        today: the tier of the unchanged script, 0 if it trains nothing; docs/adopt.md defines the four.
        then: the tier with the changes; the same as today if there are none.
        says: the report, in plain lines.
        diff: unified; empty if no change is proposed.
        text: the changed script.
    """

    today: int
    then: int
    says: list[str] = field(default_factory=list)
    diff: str = ""
    text: str = ""


def propose(text: str, name: str, beside: Mapping[str, str] | None = None) -> Proposal:
    """Make the proposal for a script. Raises `UsageError` if it is not valid Python.

    Args:
        text: of the script, with its original line ends.
        name: of its file.
        beside: texts of the modules in the same folder that it imports, by file name.
    """
    mark, plain = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
    windows = plain.count("\r\n") == plain.count("\n") > 0
    script = read(plain.replace("\r\n", "\n") if windows else plain, name)
    made = _verdict(script, name)
    if not made.today:
        made = _elsewhere(name, beside or {}) or made
    changed = made.text or script.text
    made.text = mark + (changed.replace("\n", "\r\n") if windows else changed)
    made.diff = "".join(map(_whole, difflib.unified_diff(lines_of(text), lines_of(made.text), name, name)))
    if made.diff:
        made.says.append(
            f"with the diff ({_new(made.diff)} new lines, the rest is indentation): tier {made.then}, recovery"
        )
    made.says += [f"line {each.line}: {each.what}" for each in habits(script)] if made.today else []
    if made.then > 1:
        made.says.append(_TRY.format(name=name))
    return made


def _whole(line: str) -> str:
    """A line of a diff, with the marker that `patch` needs if the file's last line has no line end."""
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _elsewhere(name: str, beside: Mapping[str, str]) -> Proposal | None:
    """The proposal if a module beside the script contains the training; None: no module does."""
    for other, text in beside.items():
        try:
            script = read(text.removeprefix("\ufeff"), other)
        except UsageError:
            continue
        if script.framework or script.training is not None or updates_somewhere(script.tree):
            line = f", line {script.training.steps.lineno}" if script.training is not None else ""
            where = f"{name}: its training is in {other}{line}, which it imports; regrow port {other} shows what "
            return Proposal(1, 1, [f"{where}would change there", _today(name)])
    return None


def _new(diff: str) -> int:
    """Number of new lines in a diff, ignoring indentation."""
    lines = lines_of(diff)[2:]
    gone = {line[1:].strip() for line in lines if line.startswith("-")}
    return sum(line.startswith("+") and line[1:].strip() not in gone for line in lines)


def _verdict(script: ScriptText, name: str) -> Proposal:
    if uses_regrow(script.tree):
        return Proposal(3, 3, [f"{name} uses regrow already: tier 3, recovery"])
    whose = {"transformers": "Hugging Face's Trainer", "trl": "a trainer of TRL", "accelerate": "Accelerate"}
    if script.framework:
        calls = {called(node) for node in ast.walk(script.tree)}
        only_fabric = "Trainer" not in script.text or ("Fabric" in calls and "Trainer" not in calls)
        fabric = script.framework == "lightning" and only_fabric
        lightning = "Lightning's Fabric" if fabric else "a trainer of Lightning"
        says = [f"{name}: {whose.get(script.framework, lightning)}", _today(name)]
        if fabric:
            return Proposal(1, 1, [*says, _FABRIC])
        return _framework(script, name, says)
    if script.training is None and updates_somewhere(script.tree):
        by_hand = "found no loop with an optimizer step (is it in a method of a class?): see docs/epochs.md, by hand"
        return Proposal(1, 1, [f"{name}: {by_hand}", _today(name)])
    if script.training is None:
        return Proposal(0, 0, [f"{name}: no training was found, neither a loop with an optimizer step nor a trainer"])
    return _own_loop(script, name)


def _framework(script: ScriptText, name: str, says: list[str]) -> Proposal:
    """Replace the import; for Accelerate, also the head of its loops."""
    source = script
    if script.framework == "accelerate":
        looped_text = accelerated(script, script.training) if script.training is not None else ""
        if not looped_text:
            return Proposal(1, 1, [*says, _BY_HAND])
        source = read(looped_text, name)
    text = adapted(source)
    if text == script.text:
        says.append(f"import its classes by name, from regrow_recipes.adapters.{script.framework}: docs/adopt.md")
        return Proposal(1, 1, says)
    heads = " and the heads of its two loops" if script.framework == "accelerate" else ""
    says.append(f"its imports change{heads}")
    for kind in untried(script):
        says.append(f"{kind} is made recoverable as a subclass of a known trainer, which regrow try has to confirm")
    return Proposal(1, 3, says, text=text)


def _own_loop(script: ScriptText, name: str) -> Proposal:
    training = script.training
    if training is None:
        raise ValueError("there is no loop")  # pragma: no cover
    where = getattr(training.inside, "name", "the script")
    form = "a loop of epochs" if training.epochs is not None else "one loop"
    says = [f"{name}: {form}, its steps in {where}, {_parallel(script)}", _today(name)]
    stopping = [each for each in habits(script) if each.stops]
    if stopping:
        says.append("tier 3, recovery, needs a loop of steps, which has to be written by hand:")
        return Proposal(1, 1, says)
    if not training.protected:
        says.append("the variables of the model and its optimizer were not found: call session.protect(...) by hand")
        return Proposal(1, 1, says)
    if training.call is not None and not _passes_epoch(script):
        says.append(f"pass the epoch to {where}(), so that it can loop over its steps: for step in epoch")
        return Proposal(1, 1, says)
    text = looped(script, training)
    try:
        ast.parse(text)
    except SyntaxError:
        says.append("its text could not be changed safely: docs/epochs.md has the changes, to be made by hand")
        return Proposal(1, 1, says)
    return Proposal(1, 3, says, text=text)


def _passes_epoch(script: ScriptText) -> bool:
    training = script.training
    if training is None or training.call is None or training.epochs is None:
        return False
    target = ast.unparse(training.epochs.target)
    given = [*training.call.args, *(each.value for each in training.call.keywords)]
    return any(ast.unparse(each) == target for each in given)


def _today(name: str) -> str:
    return f"today, as it is: tier 1, environment: regrow run {name} in the place of torchrun"


def _parallel(script: ScriptText) -> str:
    if script.wrapped:
        return "parallel by FSDP2" if script.wrapped == "fully_shard" else f"parallel by {script.wrapped}"
    own = sorted({name for node in ast.walk(script.tree) if (name := called(node)) in _REDUCING})
    if own:
        return f"parallel by collectives of its own ({', '.join(own)})"
    return "on one process, as far as this file shows: with DDP, other ranks would hold the model's state too"
