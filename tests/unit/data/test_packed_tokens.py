"""Windows of a packed corpus: what nanoGPT would read from the stream, and what is said where files are damaged."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from regrow.core.errors import DataError, UsageError
from regrow.data.packing.corpus import read_corpus
from regrow.data.packing.packer import PackOptions, pack
from regrow.data.tokens import PackedTokens

TEXTS = ["abc", "", "defghij", "k", "lmnopqrstuvwxyz", "", "0123456789" * 5]
EOS = 256


def _pack(folder: Path, *, shard_bytes: int = 40, eos: int | None = EOS, dtype: str | None = None) -> Path:
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = PackOptions(
        [str(source)],
        folder / "corpus",
        "bytes",
        workers=1,
        append_eos=None if eos is None else str(eos),
        dtype=dtype,
        shard_bytes=shard_bytes,
    )
    pack(words, Console(quiet=True))
    return folder / "corpus"


def _stream(eos: int | None = EOS) -> list[int]:
    return [token for text in TEXTS for token in [*text.encode(), *([] if eos is None else [eos])]]


@pytest.mark.parametrize("shard_bytes", [20, 40, 1000])
@pytest.mark.parametrize("stride", [None, 1, 3, 11])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_samples_are_windows_of_the_stream(tmp_path: Path, shard_bytes: int, stride: int | None, dtype: str) -> None:
    corpus = _pack(tmp_path, shard_bytes=shard_bytes, dtype=dtype)
    assert (len(read_corpus(corpus).shards) > 1) == (shard_bytes < 1000)
    dataset, stream = PackedTokens(corpus, 8, stride=stride), _stream()
    step = stride or 8
    expected = [stream[at : at + 9] for at in range(0, len(stream) - 8, step)]
    assert [dataset[index]["tokens"].tolist() for index in range(len(dataset))] == expected
    assert dataset[0]["tokens"].dtype == torch.int64
    assert dataset[-1]["tokens"].tolist() == expected[-1]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_with_the_default_stride_each_token_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    dataset, stream = PackedTokens(_pack(tmp_path), 5), _stream()
    targets = [token for index in range(len(dataset)) for token in dataset[index]["tokens"][1:].tolist()]
    assert targets == stream[1 : 1 + len(targets)]
    assert len(stream) - 1 - len(targets) < 5


@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("shard_bytes", [20, 1000])
def test_boundaries_tell_documents_apart(tmp_path: Path, eos: int | None, shard_bytes: int) -> None:
    dataset = PackedTokens(_pack(tmp_path, eos=eos, shard_bytes=shard_bytes), 10, stride=7, boundaries=True)
    owner = [n for n, text in enumerate(TEXTS) for _ in range(len(text) + (eos is not None))]
    for index in range(len(dataset)):
        owners = owner[index * 7 : index * 7 + 11]
        kinds = sorted(set(owners))
        sample = dataset[index]
        assert sample["documents"].tolist() == [kinds.index(each) for each in owners]
        assert sample["positions"].tolist() == [at - owners.index(each) for at, each in enumerate(owners)]
        assert sample["documents"].dtype == sample["positions"].dtype == torch.int64


def test_as_stored_a_window_is_a_view_that_others_do_not_see_changes_of(tmp_path: Path) -> None:
    corpus = _pack(tmp_path, shard_bytes=1000)
    dataset = PackedTokens(corpus, 8, dtype=None)
    first, second = dataset[0]["tokens"], PackedTokens(corpus, 8, stride=1, dtype=None)[1]["tokens"]
    assert first.dtype == torch.uint16
    before = (corpus / "tokens-000000.bin").read_bytes()
    assert dataset[1]["tokens"].data_ptr() - first.data_ptr() == 16
    first[:] = 0
    assert dataset[0]["tokens"].tolist() == [0] * 9
    assert second.tolist() == _stream()[1:10]
    assert (corpus / "tokens-000000.bin").read_bytes() == before


def test_a_process_that_gets_it_pickled_opens_files_of_its_own(tmp_path: Path) -> None:
    dataset = PackedTokens(_pack(tmp_path), 8)
    first = dataset[0]["tokens"].tolist()
    content = pickle.dumps(dataset)
    assert pickle.loads(content)[0]["tokens"].tolist() == first
    assert len(content) < 3000


def test_the_fingerprint_changes_with_corpus_and_cut_and_not_with_the_place(tmp_path: Path) -> None:
    corpus = _pack(tmp_path)
    first = PackedTokens(corpus, 8).fingerprint()
    moved = corpus.rename(tmp_path / "moved")
    assert PackedTokens(moved, 8).fingerprint() == first
    others = [PackedTokens(moved, 9), PackedTokens(moved, 8, stride=4), PackedTokens(moved, 8, boundaries=True)]
    _pack(tmp_path, eos=None)
    others.append(PackedTokens(tmp_path / "corpus", 8))
    assert len({first, *(other.fingerprint() for other in others)}) == 5


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("when", ["before", "mapped later"])
def test_a_truncated_shard_is_named(tmp_path: Path, suffix: str, when: str) -> None:
    corpus = _pack(tmp_path)
    dataset = PackedTokens(corpus, 8, boundaries=True)
    path = corpus / f"tokens-000001{suffix}"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    with pytest.raises(DataError, match=f"{path} has {size - 2} bytes instead of {size}"):
        if when == "before":
            PackedTokens(corpus, 8)
        else:
            [dataset[index] for index in range(len(dataset))]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    corpus = _pack(tmp_path)
    (corpus / "tokens-000001.bin").unlink()
    with pytest.raises(DataError, match=r"tokens-000001.bin is missing"):
        PackedTokens(corpus, 8)


def test_verify_finds_a_flipped_bit(tmp_path: Path) -> None:
    corpus = _pack(tmp_path)
    dataset = PackedTokens(corpus, 8)
    dataset.verify()
    path = corpus / "tokens-000001.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokens-000001.bin is damaged"):
        dataset.verify()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("elsewhere", "is no corpus: it has no corpus.json"),
        ("unfinished", "is not finished"),
        ("garbage", "corpus.json is damaged, or of another version"),
        ("newer", "is of format 9"),
        ("long", r"has \d+ tokens, a sample of length 1000 needs 1001"),
        ("zero", "windows of length 0"),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path: Path, harm: str, said: str) -> None:
    corpus = _pack(tmp_path)
    manifest = corpus / "corpus.json"
    if harm == "unfinished":
        manifest.rename(corpus / "packing")
    if harm == "garbage":
        manifest.write_text("{")
    if harm == "newer":
        manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9', 1))
    with pytest.raises((UsageError, DataError), match=said):
        PackedTokens(tmp_path if harm == "elsewhere" else corpus, {"long": 1000, "zero": 0}.get(harm, 8))


def test_anyone_can_read_the_files(tmp_path: Path) -> None:
    corpus = _pack(tmp_path, shard_bytes=1000)
    tokens = np.fromfile(corpus / "tokens-000000.bin", dtype="<u2")
    ends = np.fromfile(corpus / "tokens-000000.idx", dtype="<i8")
    assert tokens.tolist() == _stream()
    assert ends.tolist() == np.cumsum([len(text) + 1 for text in TEXTS]).tolist()
