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
from regrow_recipes.recipes.documents import Encoder
from regrow_recipes.recipes.packing import pack, split
from regrow_recipes.recipes.preparing import AboutRows, RowsOrder, about, data_files, prepare, shown
from regrow_recipes.recipes.rows import Rows, batch_of
from regrow_recipes.recipes.shapes import detect


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


ASKED = "<user>no?<assistant>"
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request."


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}, QUESTION, ANSWER]}, f"{ASKED}yes</s>{ASKED}[[yes</s>]]"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 1}]}, f"{ASKED}[[yes</s>]]"),
        ({"messages": [QUESTION, {**ANSWER, "train": False}, QUESTION, ANSWER]}, f"{ASKED}yes</s>{ASKED}[[yes</s>]]"),
        ({"messages": [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]}, None),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("n", "o?")]}, ANSWER]}, None),
        ({"messages": [{**QUESTION, "weight": None, "tool_calls": None}, ANSWER], "tools": None}, None),
        ({"conversations": [{"from": "human", "value": "no?"}, {"from": "gpt", "value": "yes"}]}, None),
        ({"conversations": [{"role": "user", "content": "no?"}, {"role": "assistant", "content": "yes"}]}, None),
        ({"system": "hm", "conversations": [{"from": "bot", "value": "yes"}]}, "<system>hm<assistant>[[yes</s>]]"),
        ({"instruction": "no?", "input": "", "output": "yes"}, None),
        ({"instruction": "no?", "input": "a", "output": "yes"}, "<user>no?\n\na<assistant>[[yes</s>]]"),
        ({"question": "no?", "answer": "yes"}, None),
        ({"prompt": "ab", "response": "cd"}, "ab[[cd</s>]]"),
        ({"chosen": "a", "rejected": "b", "prompt": "c"}, "c[[a</s>]]"),
    ],
)
def test_records_are_taken_as_people_have_them(tokenizer: Any, record: dict[str, Any], text: str | None) -> None:
    format = detect(record)
    encoder = Encoder(tokenizer, format)
    document = encoder.pair(record)[0] if format == "preference" else encoder.document(record)
    assert shown(tokenizer, document) == (text or f"{ASKED}[[yes</s>]]")


def test_an_instruction_has_the_published_prompt_where_no_chat_template_is(folder: Path) -> None:
    plain = AutoTokenizer.from_pretrained(folder)
    plain.chat_template = None
    document = Encoder(plain, "alpaca").document({"instruction": "no?", "output": "yes"})
    assert [token for token, counted in zip(*document, strict=True) if counted] == [
        *plain.encode("yes"),
        plain.eos_token_id,
    ]
    assert ALPACA.replace(" ", "")[:40] in shown(plain, document).replace(" ", "")


def test_tokens_are_taken_as_they_are_and_padding_is_left_out(tokenizer: Any) -> None:
    tokens = tokenizer.encode("abcd")
    record = {"input_ids": [*tokens, 0], "labels": [-100, *tokens[1:], -100], "attention_mask": [1] * len(tokens) + [0]}
    assert detect(record) == "tokens"
    document = Encoder(tokenizer, "tokens").document(record)
    assert document == (tokens, [False] + [True] * (len(tokens) - 1))


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{{ tools[0].name }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_tools_and_their_calls_are_given_to_the_template(tokenizer: Any) -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    record = {"messages": [QUESTION, called, {"role": "tool", "content": "2"}, ANSWER], "tools": '[{"name": "add"}]'}
    before, tokenizer.chat_template = tokenizer.chat_template, TOOLS_TEMPLATE
    try:
        document = Encoder(tokenizer, "messages").document(record)
        assert shown(tokenizer, document) == f"<tools>add{ASKED}[[1]]<tool>2<assistant>[[yes]]"
    finally:
        tokenizer.chat_template = before
    with pytest.raises(DataError, match="the chat template leaves its tools out"):
        Encoder(tokenizer, "messages").document({"messages": [QUESTION, ANSWER], "tools": [{"name": "add"}]})


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


def test_columns_have_the_names_that_the_records_give_them(folder: Path, tmp_path: Path) -> None:
    told = rows_of(folder, tmp_path, [{"q": "ab", "a": "cd"}], columns={"prompt": "q", "completion": "a"})
    assert (told.format, told.first) == ("prompt-completion", "ab[[cd</s>]]")


def test_pairs_lie_beside_each_other(folder: Path, tmp_path: Path) -> None:
    line = {"prompt": "ab", "chosen": "cdef", "rejected": "g"}
    rows_of(folder, tmp_path, [line], method="dpo", pack=False)
    row = Rows(tmp_path / "rows")[0]
    assert tuple(row["input_ids"].shape) == (2, 16)
    assert (row["labels"] != -100).sum(1).tolist() == [5, 2]


@pytest.mark.parametrize(
    ("lines", "more", "sentence"),
    [
        (["{"], {}, "data.jsonl, line 1 is not valid JSON"),
        (["[1]"], {}, "line 1 is not an object with keys"),
        ([{"text": "a"}, {"txt": "b"}], {}, "line 2: it has no text; its keys are txt"),
        ([{"txt": "b"}], {}, "a record with the keys txt fits none of the formats"),
        ([{"messages": "hello"}], {}, "its messages is not a list of messages"),
        ([{"prompt": "a", "chosen": "b", "rejected": "c"}], {}, "the records are of the format preference, which full"),
        ([{"text": "a"}], {"method": "dpo"}, "the records are of the format text, which dpo does not train on"),
        (
            [{"messages": [ANSWER]}],
            {"method": "pretrain"},
            "the first record is of the format messages .pretrain takes text",
        ),
        ([], {}, "no record in the data has anything to predict"),
        ([{"messages": [QUESTION, {**ANSWER, "role": "bot"}]}], {}, "have the roles bot, user, and none is assistant"),
        ([{"messages": [QUESTION, {**ANSWER, "content": None}]}], {}, "message 2 is an answer whose content is null"),
        ([{"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}], {}, "message 2 has the weight 0.5"),
        (
            [{"messages": [{**QUESTION, "content": [{"type": "image_url"}]}]}],
            {},
            "1 has parts of the kind image_url",
        ),
        ([{"messages": [QUESTION, ANSWER], "tools": "{"}], {}, "line 1: its tools are not valid JSON"),
        (
            [{"conversations": [{"from": "human"}]}],
            {},
            "turn 1 of its conversations has neither from and value nor role and content",
        ),
        ([{"input_ids": [1, 2], "labels": [2, 3]}], {}, "label 0 is 2, and the token is 1"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "it has 2 input_ids, 1 labels"),
        (
            [{"q": "a", "a": "b"}],
            {"columns": {"prompt": "p"}},
            "it has no p, which data.columns names",
        ),
        ([{"prompt": "a" * 30, "completion": "b"}], {}, "no record in the data has anything to predict"),
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
    (tmp_path / "d.json").write_text('[{"text": "jkl"},\n {"text": "m"}]')
    (tmp_path / "e.csv").write_bytes(b'\xef\xbb\xbftext,more\r\n"n,\r\n""o""",1\r\n')
    files = data_files([str(tmp_path / "*")])
    prepare(
        RowsOrder(files, "auto", "pretrain", 16, True, ""), AutoTokenizer.from_pretrained(folder), tmp_path / "rows"
    )
    assert np.load(tmp_path / "rows" / "used.npy").tolist() == [16, 10]
    with pytest.raises(UsageError, match="data.train: no file matches"):
        data_files([str(tmp_path / "*.arrow")])
