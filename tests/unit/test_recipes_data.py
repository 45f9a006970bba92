"""From records to rows: what counts, what is packed with what, and what is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.scripts.tiny_families import save_tokenizer
from transformers import AutoTokenizer

from regrow.core.errors import DataError, UsageError
from regrow.recipes.documents import Encoder, detect
from regrow.recipes.packing import pack, split
from regrow.recipes.preparing import AboutRows, RowsOrder, about, data_files, prepare, shown
from regrow.recipes.rows import Rows, batch_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@given(st.lists(st.integers(1, 50), max_size=300))
def test_each_document_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = pack(lengths, 50)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    assert all(sum(lengths[number] for number in row) <= 50 for row in rows)
    assert rows == pack(lengths, 50)
    # No two rows of those that are open could be one.
    left = [50 - sum(lengths[number] for number in row) for row in rows[:64]]
    assert len(rows) > 64 or sum(each >= 25 for each in left) <= 1 or not lengths


def test_long_documents_are_split_without_a_gap() -> None:
    assert split(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert split(4, 4) == [(0, 4)]


ANSWER = {"role": "assistant", "content": "yes"}
QUESTION = {"role": "user", "content": "no?"}


@pytest.mark.parametrize(
    ("record", "format", "text"),
    [
        ({"text": "abc"}, "text", "[[abc</s>]]"),
        ({"prompt": "ab", "completion": "cd"}, "prompt-completion", "ab[[cd</s>]]"),
        ({"messages": [QUESTION, ANSWER]}, "messages", "<user>no?<assistant>[[yes</s>]]"),
        (
            {"messages": [QUESTION, ANSWER, QUESTION, ANSWER]},
            "messages",
            "<user>no?<assistant>[[yes</s>]]<user>no?<assistant>[[yes</s>]]",
        ),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, "prompt-completion", "<user>no?<assistant>[[yes</s>]]"),
    ],
)
def test_answers_count_and_prompts_do_not(tokenizer: Any, record: dict[str, Any], format: str, text: str) -> None:
    assert detect(record) == format
    assert shown(tokenizer, Encoder(tokenizer, format).document(record)) == text


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "no"}]},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, {**ANSWER, "content": "no"}]},
    ],
)
def test_preferences_have_a_prompt_or_begin_alike(tokenizer: Any, record: dict[str, Any]) -> None:
    assert detect(record) == "preference"
    chosen, rejected = Encoder(tokenizer, "preference").pair(record)
    assert shown(tokenizer, chosen) == "<user>no?<assistant>[[yes</s>]]"
    assert shown(tokenizer, rejected) == "<user>no?<assistant>[[no</s>]]"


def test_answers_that_a_template_rewrites_do_not_count_and_are_counted(tokenizer: Any) -> None:
    last_alone = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    before, tokenizer.chat_template = tokenizer.chat_template, last_alone
    try:
        encoder = Encoder(tokenizer, "messages")
        document = encoder.document({"messages": [QUESTION, ANSWER, QUESTION, ANSWER]})
    finally:
        tokenizer.chat_template = before
    assert shown(tokenizer, document) == "<user>no?<assistant><user>no?<assistant>[[yes]]"
    assert encoder.turns_left_out == 1


def rows_of(folder: Path, out: Path, lines: list[Any], **more: Any) -> AboutRows:
    data = out / "data.jsonl"
    data.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    plain = RowsOrder([str(data)], format="auto", method="full", length=16, pack=True, tokenizer="")
    order = msgspec.structs.replace(plain, **more)
    prepare(order, AutoTokenizer.from_pretrained(folder), out / "rows")
    return about(out / "rows")


def test_rows_are_full_of_whole_documents_whose_first_tokens_are_not_predicted(folder: Path, tmp_path: Path) -> None:
    told = rows_of(folder, tmp_path, [{"text": "abcde"}, {"text": "fgh"}, {"text": "ijklmn"}])
    assert (told.rows, told.documents, told.tokens, told.cut) == (2, 3, 17, 0)
    rows = Rows(tmp_path / "rows")
    row = rows[0]
    assert row["position_ids"].tolist() == [*range(6), *range(4), *range(6)]
    assert (row["labels"] == -100).nonzero().flatten().tolist() == [0, 6, *range(10, 16)]
    assert int(row["used"]) == 10
    batch = batch_of([rows[0], rows[1]])
    assert batch.pop("row").tolist() == [0, 1]
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(
        ["input_ids", "labels", "position_ids"], (2, 10)
    )


def test_long_text_is_split_and_a_long_answer_cut(folder: Path, tmp_path: Path) -> None:
    assert rows_of(folder, tmp_path, [{"text": "a" * 40}]).rows == 3
    (tmp_path / "cut").mkdir()
    told = rows_of(folder, tmp_path / "cut", [{"prompt": "a", "completion": "b" * 40}], pack=False)
    assert (told.rows, told.tokens, told.cut) == (1, 16, 1)


def test_pairs_lie_beside_each_other(folder: Path, tmp_path: Path) -> None:
    line = {"prompt": "ab", "chosen": "cdef", "rejected": "g"}
    rows_of(folder, tmp_path, [line], method="dpo", pack=False)
    row = Rows(tmp_path / "rows")[0]
    assert tuple(row["input_ids"].shape) == (2, 16)
    assert (row["labels"] != -100).sum(1).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("lines", "more", "sentence"),
    [
        (["{"], {}, "data.jsonl, line 1 is no JSON"),
        (["[1]"], {}, "line 1 is no object with keys"),
        ([{"text": "a"}, {"txt": "b"}], {}, "line 2: its text is no text: None"),
        ([{"txt": "b"}], {}, "a record has the keys txt, and none of the formats"),
        ([{"messages": "hello"}], {}, "its messages is no list of messages"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {}, "the records are of the format preference, which full"),
        ([{"text": "a"}], {"method": "dpo"}, "the records are of the format text, which dpo does not train on"),
        (
            [{"messages": [ANSWER]}],
            {"method": "pretrain"},
            "the records are of the format messages .pretrain takes text",
        ),
        ([], {}, "there is no record with anything to predict"),
        ([{"prompt": "a" * 30, "completion": "b"}], {}, "there is no record with anything to predict"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(
    folder: Path, tmp_path: Path, lines: list[Any], more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence):
        rows_of(folder, tmp_path, lines, **more)
    assert not (tmp_path / "rows").exists()


def test_files_of_every_kind_are_read(folder: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "def"}\n'))
    parquet.write_table(pa.table({"text": ["ghi"]}), tmp_path / "c.parquet")
    files = data_files([str(tmp_path / "*")])
    prepare(
        RowsOrder(files, "auto", "pretrain", 16, True, ""), AutoTokenizer.from_pretrained(folder), tmp_path / "rows"
    )
    assert np.load(tmp_path / "rows" / "used.npy").tolist() == [12]
    with pytest.raises(UsageError, match="data.train: there is no file"):
        data_files([str(tmp_path / "*.json")])
