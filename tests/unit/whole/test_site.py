"""The documentation as a site: links, blocks of code, and a reference in which any flag and any record is found."""

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.sources import PACKAGES, ROOT, SOURCE
from website import nav
from website.assemble import assemble, sources, written
from website.commands import Verb, below, root
from website.links import Block, anchors, blocks, broken, links, slug, spans

import regrow
import regrow.data
from regrow.core import errors, records

WRITTEN = [path for path in written() if ROOT / "website" not in path.parents]
MESSAGES = {"cannot"}
"""Words that come after `regrow` in its messages, as pages quote them."""
each_page = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of the pages, and their texts."""
    folder = tmp_path_factory.mktemp("site")
    return folder / "pages", assemble(folder)


def all_verbs() -> dict[tuple[str, ...], Verb]:
    return {verb.words: verb for verb in (root(), *below(root()))}


def lines_of(text: str) -> Iterator[str]:
    """Command lines of a block: continued ones as one, without comments and what stands before `regrow`."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for part in re.split(r"\s[|;&]+\s|\s-- |\$\(", re.sub(r"(^|\s)#.*", "", line)):
            found = re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/bin/)?regrow (?=[a-z-])(.*)", part)
            if found:
                yield found.group(1)


def wrong_flags(line: str) -> list[str]:
    """Verbs and flags of a command line, without its first word, that are not there."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = line.split()  # prose beside it: an apostrophe is no quote
    if words[0] in MESSAGES:
        return []
    verbs = all_verbs()
    verb, rest = verbs[()], [word.strip("[]") for word in words]
    while rest and isinstance(verb.command, click.Group) and not rest[0].startswith("-"):
        name = rest.pop(0)
        # `regrow kill|drain` and `regrow K8S …` name several, or none.
        hidden = verb.command.get_command(verb.context, name)
        if (*verb.words, name) not in verbs and hidden is None:
            return [] if re.search(r"[^a-z0-9-]", name) else [f"regrow {name}"]
        if (*verb.words, name) not in verbs:
            return []
        verb = verbs[(*verb.words, name)]
    return list(_unknown(verb, rest))


def _unknown(verb: Verb, words: list[str]) -> Iterator[str]:
    known = {
        name: each
        for each in verb.command.get_params(verb.context)
        if isinstance(each, click.Option)
        for name in (*each.opts, *each.secondary_opts)
    }
    spelled = verb.context.token_normalize_func or (lambda name: name)
    normalize = verb.command.context_settings.get("token_normalize_func", spelled)
    takes_all = verb.command.context_settings.get("allow_interspersed_args") is False
    waiting = iter(words)
    for word in waiting:
        if word == "--" or (takes_all and not word.startswith("-") and word not in ("...", "…")):
            return
        if re.fullmatch(r"--[a-z_][\w-]*(=.*)?|-[a-z]", word):
            name = normalize(word.partition("=")[0])
            if name not in known:
                yield f"regrow {' '.join(verb.words)}: {word}"
            elif not known[name].is_flag and not known[name].count and "=" not in word:
                next(waiting, None)


@each_page
def test_every_link_leads_to_a_file_and_every_anchor_to_a_heading(page: Path) -> None:
    assert list(broken(page)) == []


@each_page
def test_every_block_of_python_can_be_parsed(page: Path) -> None:
    wrong = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            try:
                ast.parse(textwrap.dedent(block.text))
            except SyntaxError as error:
                wrong.append(f"{error}: {block.text[:200]}")
    assert wrong == []


@pytest.mark.parametrize("page", list(written()), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_line_has_verbs_and_flags_that_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.parent.name == "decisions" or page.name == "CHANGELOG.md":
        return  # of their day
    shown = [block.text for block in blocks(text) if block.language in ("", "bash", "sh", "console", "text")]
    lines = [line for each in [*shown, *spans(text)] for line in lines_of(each)]
    assert [wrong for line in lines for wrong in wrong_flags(line)] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("run --nproc_per_node 4 --standby=1 train.py --no-such 1", []),
        ("run --nproc-per-node 4 --standbys 1 train.py", ["regrow run: --standbys"]),
        ("kill --rank 1 --how sigstop", []),
        ("kill --rank 1 --how-much", ["regrow kill: --how-much"]),
        ("slurm submit job.toml --nope", ["regrow slurm submit: --nope"]),
        ("no-such-verb", ["regrow no-such-verb"]),
    ],
)
def test_a_wrong_command_line_would_be_seen(line: str, wrong: list[str]) -> None:
    assert wrong_flags(line) == wrong


def test_a_wrong_link_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A *b* `c_d`\n\n## A b c_d\n\n[1](#a-b-c_d) [2](#a-b-c_d-1) [3](#x) [4](y.md) `[5](z)`\n\n```\n[6](z)\n```\n"
    )
    assert anchors(page.read_text()) == {"a-b-c_d", "a-b-c_d-1"}
    assert list(broken(page)) == ["#x: no such heading", "y.md: no such file"]
    assert slug("The ladder, and exit codes") == "the-ladder-and-exit-codes"
    assert blocks("~~~python\nx\n~~~\n") == [Block("python", "x\n")]


def test_every_link_within_the_site_leads_somewhere(site: tuple[Path, dict[str, str]]) -> None:
    """Those to names of Python are made by the site's own tools, which `make docs` holds to it."""
    folder, pages = site
    wrong = [
        f"{place}: {each}"
        for place in pages
        for each in broken(folder / place)
        if not re.match(r"\S*reference/api/\S+#|\S*regrow\.md#regrow\.", each)
    ]
    assert wrong == []
    outside = [(place, link) for place, text in pages.items() for link in links(text) if link.startswith("/")]
    assert outside == []


def test_every_page_has_its_place_in_one_of_four_parts(site: tuple[Path, dict[str, str]]) -> None:
    _, pages = site
    tree = nav.ordered(pages)
    assert [next(iter(part)) for part in tree] == ["Get started", "Guides", "Reference", "How it works"]
    listed = re.findall(r"'([\w./-]+\.md)'", str(tree))
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(pages)
    assert [page for page in pages if page not in listed and not page.startswith(("decisions/", "files/"))] == []


def test_a_page_without_a_place_stands_at_the_end_of_the_guides() -> None:
    (guides,) = [
        part["Guides"] for part in nav.ordered(["data.md", "decisions/index.md", "quite-new.md"]) if "Guides" in part
    ]
    assert guides == ["guides/index.md", {"Data": ["data.md"]}, {"Further": ["quite-new.md"]}]


def test_any_flag_is_found(site: tuple[Path, dict[str, str]]) -> None:
    _, pages = site
    seen = 0
    for verb in below(root()):
        page = pages[f"reference/cli/{verb.words[0]}.md"]
        for option in verb.options:
            flag = max(option.opts, key=len)
            if flag != "--help":
                seen += 1
                assert f"| `{flag}`" in page, f"{' '.join(verb.words)} {flag}"
                assert f"| `{flag}` |" in pages["reference/cli/index.md"]
    assert seen > 150


def test_any_record_and_each_of_its_fields_is_found(site: tuple[Path, dict[str, str]]) -> None:
    _, pages = site
    page = pages["reference/records.md"]
    for kind in records.AnyRecord.__args__:
        section = page.partition(f"## {kind.__name__}\n")[2].partition("\n## ")[0]
        assert [name for name in kind.__annotations__ if f"| `{name}` |" not in section] == [], kind.__name__


def test_any_public_name_metric_field_and_variable_is_found(site: tuple[Path, dict[str, str]]) -> None:
    _, pages = site
    for module in (regrow, regrow.data):
        page = pages[f"reference/api/{module.__name__}.md"]
        names = [name for name in module.__all__ if not name.startswith("__")]
        assert [name for name in names if not re.search(rf"^(::: .*\.|## ){name}$", page, re.M)] == []
    page = pages["reference/api/regrow.core.errors.md"]
    assert [each.__name__ for each in errors.PUBLIC if f".{each.__name__}" not in page] == []
    watch = (SOURCE / "observe" / "watch" / "exposition.py").read_text()
    served = set(re.findall(r'"(regrow_[a-z_]+)"', watch))
    assert len(served) > 10
    assert [name for name in served if f"| `{name}` |" not in pages["reference/metrics.md"]] == []
    assert "`.spec.replicaCount`" in pages["reference/resources/trainingjob.md"]
    assert "| `REGROW_HOME` |" in pages["reference/environment.md"]


def test_every_package_is_in_the_site() -> None:
    assert {path.name for path in sources()} == {
        path.name for package in PACKAGES for path in (package / "src").iterdir()
    }
    assert {f"packages/{package.name}.md" for package in PACKAGES} <= set(written().values())
