"""Packing: each document once whatever the cuts, the same bytes whatever the workers, and refusals."""

import gzip
import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
from rich.console import Console

from regrow.core.errors import DataError, UsageError
from regrow.data.packing.corpus import read_corpus
from regrow.data.packing.packer import PackOptions, pack
from regrow.data.packing.tokenizing import load_tokenizer

TEXTS = [f"document {number} " * (number % 5) for number in range(60)]


def _json(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def _parquet(path: Path, texts: list[str]) -> Path:
    pa.parquet.write_table(pa.table({"n": range(len(texts)), "text": texts}), path, row_group_size=4)
    return path


def _feather(path: Path, texts: list[str]) -> Path:
    pa.feather.write_feather(pa.table({"text": texts}), path, chunksize=4)
    return path


INPUTS = [("a.jsonl", _json), ("a.jsonl.gz", _json), ("a.parquet", _parquet), ("a.feather", _feather)]


def _run(inputs: list[Path], out: Path, **words: Any) -> str:
    """Pack, and what was said."""
    said = Console(file=StringIO(), width=200)
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "shard_bytes": 300} | words
    pack(PackOptions([str(each) for each in inputs], out, **options), said)
    assert isinstance(said.file, StringIO)
    return said.file.getvalue()


def _tokens(corpus: Path) -> list[int]:
    manifest = read_corpus(corpus)
    return [
        token
        for shard in manifest.shards
        for token in np.fromfile(corpus / f"{shard.name}.bin", dtype=manifest.dtype).tolist()
    ]


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("name", "write"), INPUTS)
def test_all_kinds_of_inputs_give_the_same_stream(
    tmp_path: Path, name: str, write: Callable[[Path, list[str]], Path]
) -> None:
    said = _run([write(tmp_path / name, TEXTS)], tmp_path / "out", append_eos="256")
    assert _tokens(tmp_path / "out") == [token for text in TEXTS for token in [*text.encode(), 256]]
    assert "60 documents" in said
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == [], (
        "what it has worked with is gone"
    )


def test_a_shard_ends_with_the_document_that_fills_it(tmp_path: Path) -> None:
    texts = ["x" * length for length in (3, 0, 5, 2, 9, 0, 1)]
    _run([_json(tmp_path / "a.jsonl", texts)], tmp_path / "out", shard_bytes=16)
    corpus = read_corpus(tmp_path / "out")
    assert [(shard.tokens, shard.documents) for shard in corpus.shards] == [(8, 3), (11, 2), (1, 2)]
    ends = [np.fromfile(tmp_path / "out" / f"{shard.name}.idx", dtype="<i8").tolist() for shard in corpus.shards]
    assert ends == [[3, 3, 8], [2, 11], [0, 1]]


def test_the_bytes_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    inputs = [_json(tmp_path / "a.jsonl", TEXTS), _json(tmp_path / "b.jsonl.gz", TEXTS[:7])]
    for workers in (1, 3):
        _run(inputs, tmp_path / str(workers), workers=workers)
    assert _files(tmp_path / "1") == _files(tmp_path / "3")
    assert {name.rpartition(".")[2] for name in _files(tmp_path / "1")} == {"bin", "idx", "json"}


def test_a_finished_corpus_is_left_alone(tmp_path: Path) -> None:
    path = _json(tmp_path / "a.jsonl", TEXTS)
    first = _run([path], tmp_path / "out")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert _run([path], tmp_path / "out") == first
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


def test_a_finished_corpus_that_lost_a_file_gets_it_back(tmp_path: Path) -> None:
    path = _json(tmp_path / "a.jsonl", TEXTS)
    _run([path], tmp_path / "out")
    before = _files(tmp_path / "out")
    (tmp_path / "out" / "tokens-000001.bin").unlink()
    _run([path], tmp_path / "out")
    assert _files(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"append_eos": "256"}, "append_eos was None, not 256"),
        ({"column": "body"}, "column was text, not body"),
        ({"dtype": "uint32"}, "dtype was uint16, not uint32"),
        ({"shard_bytes": 301}, "shard_bytes was 300, not 301"),
        ({"tokenizer": "json:dumps"}, "tokenizer was bytes, not json:dumps; .*dtype was uint16, not uint32"),
        ({"inputs": ["b.jsonl"]}, "inputs was .*a.jsonl.*, not .*b.jsonl"),
        ({"inputs": ["a.jsonl", "b.jsonl"]}, "something else: inputs was "),
        ({"grown": True}, "something else: inputs was "),
    ],
)
def test_a_corpus_of_something_else_is_refused_with_what_differs(
    tmp_path: Path, words: dict[str, Any], said: str
) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        _json(tmp_path / name, TEXTS)
    _run([tmp_path / "a.jsonl"], tmp_path / "out")
    before = _files(tmp_path / "out")
    if words.pop("grown", False):
        _json(tmp_path / "a.jsonl", [*TEXTS, "more"])
    inputs = [tmp_path / name for name in words.pop("inputs", ["a.jsonl"])]
    with pytest.raises(UsageError, match=said):
        _run(inputs, tmp_path / "out", **words)
    assert _files(tmp_path / "out") == before


def test_a_changed_tokenizer_of_the_same_name_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _json(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "letters_s.py").write_text("def encode(text):\n    return [ord(letter) for letter in text]\n")
    _run([path], tmp_path / "out", tokenizer="letters_s:encode")
    (tmp_path / "letters_s.py").write_text("def encode(text):\n    return [ord(letter) + 1 for letter in text]\n")
    sys.modules.pop("letters_s")
    with pytest.raises(UsageError, match="tokenizer_digest was "):
        _run([path], tmp_path / "out", tokenizer="letters_s:encode")


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds thesis.tex and is no corpus"):
        _run([_json(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("a.jsonl", '{"text": oops}', "line 41: Expecting value at column 10"),
        ("a.jsonl.gz", '{"text": oops}', "line 41: Expecting value at column 10"),
        ("a.jsonl", '{"body": "x", "id": 1}', "line 41: it has no 'text', but 'body', 'id'"),
        ("a.jsonl", '{"text": 5}', "line 41: its 'text' is a number, not a string"),
    ],
)
def test_a_malformed_line_is_named_and_can_be_corrected(tmp_path: Path, name: str, line: str, said: str) -> None:
    good = [json.dumps({"text": text}) for text in TEXTS]
    content = "\n".join([*good[:40], line, *good[41:]]).encode()
    first, path = _json(tmp_path / "0.jsonl", TEXTS), tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for workers in (1, 2):
        with pytest.raises(DataError, match=f"{path}, {said}"):
            _run([first, path], tmp_path / "out", workers=workers)
        with pytest.raises(UsageError, match="is not finished"):
            read_corpus(tmp_path / "out")
    _json(path, TEXTS)
    _run([first, path], tmp_path / "out")
    assert _tokens(tmp_path / "out") == list("".join(TEXTS + TEXTS).encode())
    _run([first, path], tmp_path / "undisturbed")
    assert _files(tmp_path / "out") == _files(tmp_path / "undisturbed")


def test_a_null_in_a_table_is_named_by_its_row(tmp_path: Path) -> None:
    pa.parquet.write_table(pa.table({"text": [*TEXTS, None]}), tmp_path / "a.parquet", row_group_size=4)
    with pytest.raises(DataError, match=r"a.parquet, row 60: its 'text' is null, not a string"):
        _run([tmp_path / "a.parquet"], tmp_path / "out")


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_inputs_without_anything_are_said(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UsageError, match="have no tokens"):
        _run([tmp_path / "a.jsonl"], tmp_path / "out")
    _run([_json(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out")  # the folder is not spoilt


# --- tokenizers --------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_json_is_used_without_what_models_add(tmp_path: Path, trained: Path) -> None:
    from tokenizers import Tokenizer

    _run([_json(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out", tokenizer=str(trained), append_eos="</s>")
    manifest = read_corpus(tmp_path / "out")
    assert (manifest.dtype, manifest.recipe.append_eos) == ("uint16", 1)
    tokens = _tokens(tmp_path / "out")
    assert tokens.count(1) == len(TEXTS)
    assert 0 not in tokens
    assert Tokenizer.from_file(str(trained)).decode(tokens, skip_special_tokens=True) == "".join(TEXTS)
    assert len(tokens) < len("".join(TEXTS)) / 2


def test_a_function_decides_the_width_by_its_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "widths_s.py").write_text(
        "def wide(text):\n    return [70_000 + len(text)]\n"
        "def narrow(text):\n    return [len(text)]\n"
        "narrow.vocabulary = 1000\n"
        "def liar(text):\n    return [70_000]\n"
        "liar.vocabulary = 1000\n"
        "def floats(text):\n    return [0.5]\n"
        "def broken(text):\n    raise KeyError('x')\n"
    )
    path = _json(tmp_path / "a.jsonl", ["abc", "defg"])
    for name, dtype, tokens in (("wide", "uint32", [70_003, 70_004]), ("narrow", "uint16", [3, 4])):
        _run([path], tmp_path / name, tokenizer=f"widths_s:{name}")
        assert (read_corpus(tmp_path / name).dtype, _tokens(tmp_path / name)) == (dtype, tokens)
    for name, said in (
        ("liar", "a.jsonl, line 1: token 70000 does not fit into uint16"),
        ("floats", "a.jsonl, line 1: the tokenizer failed: .*float64"),
        ("broken", r"a.jsonl, line 1: the tokenizer failed: KeyError\('x'\)"),
    ):
        with pytest.raises(DataError, match=said):
            _run([path], tmp_path / name, tokenizer=f"widths_s:{name}")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gpt2", "there is no tokenizer 'gpt2'"),
        ("none.json", "none.json cannot be read"),
        ("a.jsonl.json", "is no tokenizer.json"),
        ("no_such_module:f", "importing no_such_module failed"),
        ("json:nothing", "json has no function 'nothing'"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl.json").write_text("{}")
    with pytest.raises(UsageError, match=said):
        load_tokenizer(spec)


@pytest.mark.parametrize(("eos", "said"), [("70000", "70000 does not fit"), ("</s>", "bytes has no such token")])
def test_an_end_that_cannot_be_is_refused(tmp_path: Path, eos: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _run([_json(tmp_path / "a.jsonl", TEXTS)], tmp_path / "out", append_eos=eos, dtype="uint16")
