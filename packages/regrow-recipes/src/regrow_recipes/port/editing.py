"""Edits the lines of a script for regrow; all other text stays unchanged. Pure."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass

from regrow_recipes.port.reading import COLLECTIVES, Function, OwnLoop, ScriptText, called, is_update, lines_of, own

_INDENT = "    "


@dataclass(frozen=True)
class Names:
    """Names for the new lines."""

    epoch: str
    first: int
    """The script's number of its first epoch."""
    passed: str = ""
    """The epoch's parameter in the function of the loop over steps, if it has one."""


class Lines:
    """Lines of a text that are changed one by one; line numbers remain those of the original text.

    Args:
        text: the script's.
    """

    def __init__(self, text: str) -> None:
        self._lines = lines_of(text)
        self._before: dict[int, list[str]] = {}

    def __getitem__(self, number: int) -> str:
        return self._lines[number - 1]

    def __setitem__(self, number: int, line: str) -> None:
        self._lines[number - 1] = line

    def insert(self, number: int, line: str) -> None:
        """Insert a line before the line `number`."""
        self._before.setdefault(number, []).append(line + "\n")

    def indent(self, first: int, last: int, kept: Iterable[int]) -> None:
        """Indent lines, except the continuation lines of multi-line strings (`kept`)."""
        for number in set(range(first, last + 1)) - set(kept):
            if self[number].strip():
                self[number] = _INDENT + self[number]
            self._before[number] = [_INDENT + each for each in self._before.get(number, ())]

    def drop(self, first: int, last: int) -> None:
        """Remove lines."""
        for number in range(first, last + 1):
            self[number] = ""

    def text(self) -> str:
        """The edited text."""
        numbered = enumerate(self._lines, 1)
        return "".join("".join(self._before.get(number, ())) + line for number, line in numbered)


def looped(script: ScriptText, training: OwnLoop) -> str:
    """The text with its loop over regrow's steps, and over epochs if it has these."""
    lines, loop = Lines(script.text), training.steps
    if not isinstance(loop, ast.For):
        return script.text
    names = _names(training)
    session = _start(lines, script, training)
    loader, bare = _loader_of(training), training.call
    if training.epochs is not None:
        count = count_of(training.epochs)
        replace(lines, training.epochs.iter, f"{session}.epochs({loader}, {count})")
        for first, last in _uses(training):
            rename(lines, first, last, names, bare=bare)
        for node in training.epochs.body:
            if isinstance(node, ast.Expr) and called(node.value) == "set_epoch":
                lines.drop(node.lineno, _last(node))  # regrow does this itself
    _steps(lines, training, loop, names, loader)
    _protect(lines, training, session)
    _mark(lines, script, training)
    return lines.text()


def _names(training: OwnLoop) -> Names:
    epochs = training.epochs
    if epochs is None or not isinstance(epochs.target, ast.Name):
        return Names("epoch", 0)
    name = epochs.target.id if epochs.target.id != "_" else "epoch"
    arguments = epochs.iter.args if isinstance(epochs.iter, ast.Call) else []
    first = arguments[0] if len(arguments) > 1 else None
    start = first.value if isinstance(first, ast.Constant) and type(first.value) is int else 0
    passed = _parameter(training, epochs.target.id)
    return Names(name, start, passed)


def _parameter(training: OwnLoop, variable: str) -> str:
    """Parameter by which the called function receives a variable; empty if it does not."""
    if training.call is None or not isinstance(training.inside, ast.FunctionDef):
        return ""
    parameters = [each.arg for each in training.inside.args.args]
    for given, parameter in zip(training.call.args, parameters, strict=False):
        if isinstance(given, ast.Name) and given.id == variable:
            return parameter
    named = {ast.unparse(each.value): each.arg for each in training.call.keywords}
    return named.get(variable) or ""


def _loader_of(training: OwnLoop) -> str:
    """The loader, by its name around the loop of epochs."""
    loop = training.steps
    inner = ast.unparse(through(loop.iter)[0]) if isinstance(loop, ast.For) else ""
    if training.call is None or not isinstance(training.inside, ast.FunctionDef):
        return inner
    parameters = [each.arg for each in training.inside.args.args]
    given = dict(zip(parameters, map(ast.unparse, training.call.args), strict=False))
    given |= {each.arg: ast.unparse(each.value) for each in training.call.keywords if each.arg}
    return given.get(inner, inner)


def through(given: ast.expr) -> tuple[ast.expr, bool]:
    """Iterable of a loop without `enumerate` and a progress bar; and whether the loop counts."""
    counts = False
    while isinstance(given, ast.Call) and given.args and called(given) in ("enumerate", "tqdm", "track"):
        counts |= called(given) == "enumerate"
        given = given.args[0]
    return given, counts


def count_of(epochs: ast.For) -> str:
    """Total number of epochs, as an expression."""
    arguments = epochs.iter.args if isinstance(epochs.iter, ast.Call) else []
    if called(epochs.iter) != "range" or not arguments:
        return f"len({ast.unparse(epochs.iter)})"
    if len(arguments) == 1 or not isinstance(arguments[0], ast.Constant):
        return ast.unparse(arguments[-1 if len(arguments) < 3 else 1])
    first, end = ast.unparse(arguments[0]), arguments[1]
    if isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add) and ast.unparse(end.right) == first:
        return ast.unparse(end.left)
    return f"{ast.unparse(end)} - {first}" if first != "0" else ast.unparse(end)


def _uses(training: OwnLoop) -> list[tuple[int, int]]:
    """Lines that use the variable of the epoch: the body of its loop."""
    loop = training.epochs
    return [] if loop is None else [(loop.body[0].lineno, _last(loop))]


def rename(lines: Lines, first: int, last: int, names: Names, number: str = "", bare: ast.Call | None = None) -> None:
    """Replace the epoch's variable by the epoch's number; in a call that passes it on, the variable stays."""
    number = number or f"{names.epoch}.number"
    text = f"({number} + {names.first})" if names.first else number
    spared = range(bare.lineno, (bare.end_lineno or bare.lineno) + 1) if bare is not None else range(0)
    whole = "".join(lines[at] for at in range(first, last + 1))
    for token, before, after in reversed(_tokens(whole)):
        at = first + token.start[0] - 1
        new = token.string
        if token.type == tokenize.NAME and new == names.epoch and before != "." and after != "=":
            new = text
        elif token.type == tokenize.STRING and "f" in re.split("['\"]", new, maxsplit=1)[0].lower():
            new = re.sub(rf"(\{{[^{{}}]*?)(?<![\w.]){names.epoch}(?!\w)", rf"\g<1>{text}", new)
        if new != token.string and at not in spared and token.start[0] == token.end[0]:
            line = lines[at]
            lines[at] = line[: token.start[1]] + new + line[token.end[1] :]


def _tokens(text: str) -> list[tuple[tokenize.TokenInfo, str, str]]:
    """Each token with its neighbours, if any. In brackets, a `=` after a name marks a keyword argument."""
    found: list[tokenize.TokenInfo] = []
    try:
        found.extend(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, IndentationError):
        found.append(tokenize.TokenInfo(tokenize.ENDMARKER, "", (0, 0), (0, 0), ""))
    around = [each.string for each in found]
    return list(zip(found, ["", *around], [*around[1:], ""], strict=False))


def _start(lines: Lines, script: ScriptText, training: OwnLoop) -> str:
    """Insert the import of regrow and its start; returns the session's name."""
    imports = [node for node in script.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    after = max((_last(node) for node in imports), default=0)
    lines.insert(after + 1, "import regrow")
    for function in [training.around or training.inside, *_functions(script.tree), script.tree]:
        for node in own(function):
            if isinstance(node, ast.Expr) and called(node.value) == "init_process_group":
                pad = lines[node.lineno][: node.col_offset]
                lines.drop(node.lineno, _last(node))
                lines.insert(node.lineno, f"{pad}session = regrow.init(seed=0)")
                return "session"
    around = training.around or training.inside
    body = around.body
    first = next((node for node in body if not _opens(node)), body[0])
    lines.insert(first.lineno, f"{' ' * first.col_offset}session = regrow.init(seed=0)")
    return "session"


def _opens(node: ast.stmt) -> bool:
    """True for a docstring, an import, or a definition."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return text or isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


def _functions(tree: ast.Module) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _steps(lines: Lines, training: OwnLoop, loop: ast.For, names: Names, loader: str) -> None:
    """Change the loop over batches to one over steps; the body up to its last update goes into the step."""
    _, counts = through(loop.iter)
    target = loop.target
    index = ""
    if counts and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        index, target = ast.unparse(target.elts[0]), target.elts[1]
    epoch = names.passed or names.epoch
    source = epoch if training.epochs is not None else f"session.steps({loader}, until=len({loader}))"
    bar = next((node for node in ast.walk(loop.iter) if called(node) in ("tqdm", "track")), None)
    if isinstance(bar, ast.Call):
        inner = bar.args[0]
        source = ast.unparse(bar).replace(ast.unparse(inner), source, 1)
    pad = " " * loop.col_offset
    _replace_head(lines, loop, f"{pad}for step in {source}:\n")
    inside, behind = _split(loop.body)
    deeper = pad + _INDENT
    if names.passed and training.inside is not training.around:
        shown = Names(names.passed, names.first)
        rename(lines, loop.body[0].lineno, _last(loop), shown)
    texts = _texts(lines, _top(inside[0], lines), _last(loop))
    first, last = _top(inside[0], lines), _last(loop)
    lines.indent(first, last, texts)
    entered = ast.unparse(target)
    entered = f"({entered})" if isinstance(target, ast.Tuple) and not entered.startswith("(") else entered
    lines.insert(first, f"{deeper}with step as {entered}:")
    if index:
        many = f"len({epoch})" if training.epochs is not None else f"len({loader})"
        lines.insert(first, f"{deeper}{_INDENT}{index} = step.number % {many}")
    if behind:
        lines.insert(_top(behind[0], lines), f"{deeper}if step.committed:")


def _split(body: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Split a body after the last statement that changes the trained state."""
    training = [at for at, node in enumerate(body) if any(map(_trains, ast.walk(node)))]
    end = (training[-1] if training else len(body) - 1) + 1
    return body[:end], body[end:]


def _trains(node: ast.AST) -> bool:
    if called(node) in ("update", "step") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner = ast.unparse(node.func.value).lower()
        return called(node) == "step" or "scaler" in owner or "ema" in owner
    return is_update(node) or called(node) in ("zero_grad", "backward", "update_parameters")


def _top(node: ast.stmt, lines: Lines) -> int:
    """The line at which a statement begins."""
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def _protect(lines: Lines, training: OwnLoop, session: str) -> None:
    loop = training.epochs or training.steps
    pad = " " * loop.col_offset
    lines.insert(loop.lineno, f"{pad}{session}.protect({', '.join(training.protected)})")


def _mark(lines: Lines, script: ScriptText, training: OwnLoop) -> None:
    """Mark functions with collectives that run between steps as restartable."""
    if training.epochs is None:
        return
    between = {called(node) for node in ast.walk(training.epochs) if isinstance(node, ast.Call)}
    for function in _functions(script.tree):
        if not isinstance(function, ast.FunctionDef) or function is training.inside or function.name not in between:
            continue
        if any(called(node) in COLLECTIVES for node in ast.walk(function)):
            lines.insert(_top(function, lines), f"{' ' * function.col_offset}@regrow.restartable")


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


def replace(lines: Lines, node: ast.expr, text: str) -> None:
    """Replace an expression that is on one line."""
    line = lines[node.lineno].encode()
    lines[node.lineno] = (line[: node.col_offset] + text.encode() + line[node.end_col_offset :]).decode()


def _replace_head(lines: Lines, loop: ast.For, head: str) -> None:
    lines.drop(loop.lineno, loop.iter.end_lineno or loop.lineno)
    lines[loop.lineno] = head


def _texts(lines: Lines, first: int, last: int) -> set[int]:
    """The continuation lines of multi-line strings, which indenting would change."""
    whole = "".join(lines[number] for number in range(first, last + 1))
    texts = (token for token, _, _ in _tokens(whole) if token.type == tokenize.STRING)
    return {number for token in texts for number in range(token.start[0] + first, token.end[0] + first)}
