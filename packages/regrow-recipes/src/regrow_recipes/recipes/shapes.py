"""Converts records of common formats to the few that are encoded. *Pure*.

A canonical record has one of these sets of keys: `text`; `messages`, with `tools` if there are any; `prompt` and
`completion`; `chosen` and `rejected`, with or without `prompt`; `input_ids`, with or without `labels`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from regrow.core.errors import DataError

Record = Mapping[str, Any]
Message = dict[str, Any]

FORMATS: Final = ("text", "messages", "prompt-completion", "preference", "sharegpt", "alpaca", "tokens")
_HINT: Final = (
    "the formats are text; messages (role and content); conversations (from and value); prompt and completion; "
    "instruction, input and output; question and answer; prompt, chosen and rejected; input_ids and labels. Other "
    'names: data.columns = { prompt = "their name" }'
)
_ANSWERS: Final = ("completion", "response")
_ROLES: Final = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of the ShareGPT format, and their names in chat templates."""
_ALPACA: Final = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)
_ALPACA_INPUT: Final = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)


def detect(record: Record) -> str:
    """The format of a record, from its keys. Raises `DataError`."""
    keys = record.keys()
    if {"chosen", "rejected"} <= keys:
        return "preference"
    if "messages" in keys:
        return "messages"
    if "conversations" in keys or "conversation" in keys:
        return "sharegpt"
    if "prompt" in keys and any(name in keys for name in _ANSWERS):
        return "prompt-completion"
    if {"instruction", "output"} <= keys or {"question", "answer"} <= keys:
        return "alpaca"
    if "input_ids" in keys:
        return "tokens"
    if "text" in keys:
        return "text"
    raise DataError(
        f"a record with the keys {', '.join(sorted(map(str, record)))} fits none of the formats", hint=_HINT
    )


def renamed(record: Record, columns: Mapping[str, str]) -> Record:
    """The record with its format's key names. `columns`: the record's names, by the format's. Raises `DataError`."""
    if not columns:
        return record
    missing = [theirs for theirs in columns.values() if theirs not in record]
    if missing:
        raise DataError(f"it has no {missing[0]}, which data.columns names; its keys are {', '.join(sorted(record))}")
    theirs = set(columns.values())
    return {name: value for name, value in record.items() if name not in theirs} | {
        ours: record[name] for ours, name in columns.items()
    }


def canonical(record: Record, format: str, *, chats: bool) -> Record:
    """Convert a record of any format to a canonical one.

    Args:
        record: of a file.
        format: one of `FORMATS`.
        chats: whether the tokenizer has a chat template.

    Raises:
        DataError: a key is missing, or its value does not match the format.
    """
    match format:
        case "messages":
            return {"messages": messages(record, "messages"), "tools": _tools(record)}
        case "sharegpt":
            return {"messages": _shared(record), "tools": _tools(record)}
        case "alpaca":
            return _instruction(record, chats=chats)
        case "prompt-completion":
            answer = next((name for name in _ANSWERS if name in record), "completion")
            if isinstance(record.get("prompt"), str):
                return {"prompt": text(record, "prompt"), "completion": text(record, answer)}
            found = {"prompt": messages(record, "prompt"), "completion": messages(record, answer)}
            return {**found, "tools": _tools(record)}
        case "preference":
            return _preference(record)
        case "tokens":
            return _tokens(record)
        case _:
            return {"text": text(record, "text")}


def text(record: Record, key: str) -> str:
    """The text under a key. Raises `DataError`."""
    value = _value(record, key)
    if not isinstance(value, str):
        raise DataError(f"its {key} is not a string: {value!r:.60}")
    return value


def messages(record: Record, key: str) -> list[Message]:
    """The messages under a key; each content is one text. Raises `DataError`."""
    value = _value(record, key)
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(each, Mapping) and "role" in each for each in value)
    ):
        raise DataError(f"its {key} is not a list of messages with role and content: {value!r:.60}")
    return [_message(each, at) for at, each in enumerate(value, start=1)]


def counts(message: Message) -> bool:
    """True if an answer is trained on. `weight` 0 (OpenAI) and `train` or `training` false (axolotl) exclude it."""
    return bool(message.get("weight", 1)) and bool(message.get("train", message.get("training", True)))


def _value(record: Record, key: str) -> Any:
    if key not in record:
        raise DataError(
            f"it has no {key}; its keys are {', '.join(sorted(map(str, record)))}",
            hint="the first record decides the format, unless data.format does; all records have one format",
        )
    return record[key]


def _message(given: Mapping[str, Any], at: int) -> Message:
    # Tables (Parquet, Arrow) give each message the keys of all messages.
    message = {name: value for name, value in given.items() if value is not None}
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"message {at} has the weight {weight!r}", hint="0: it is not learnt; 1: it is")
    message["content"] = _content(given, message, at)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _content(given: Mapping[str, Any], message: Message, at: int) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if "content" not in given and not message.get("tool_calls"):
            raise DataError(f"message {at} has no content; a message has role and content")
        if message["role"] == "assistant" and not message.get("tool_calls") and counts(message):
            raise DataError(
                f"message {at} is an answer whose content is null, so an empty answer would be learnt",
                hint='leave the record out, or give the message "weight": 0',
            )
        return ""
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        kinds = sorted({str(part.get("type", "text")) for part in content} - {"text"})
        if kinds:
            raise DataError(
                f"message {at} has parts of the kind {', '.join(kinds)}", hint="recipes train on text alone"
            )
        return "".join(str(part.get("text") or "") for part in content)
    raise DataError(f"the content of message {at} is not a string: {content!r:.60}")


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object, since templates encode them as JSON themselves."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    arguments = inner.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return call
        inner = {**inner, "arguments": arguments}
    return {**call, "function": inner} if isinstance(function, Mapping) else dict(inner)


def _tools(record: Record) -> list[Any]:
    tools = record.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except json.JSONDecodeError as error:
            raise DataError(f"its tools are not valid JSON: {error}") from error
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(f"its tools are not a list of objects: {tools!r:.60}")
    return [dict(tool) for tool in tools]


def _shared(record: Record) -> list[Message]:
    key = "conversation" if "conversation" in record and "conversations" not in record else "conversations"
    turns = _value(record, key)
    if (
        not isinstance(turns, Sequence)
        or isinstance(turns, str)
        or not all(isinstance(turn, Mapping) for turn in turns)
    ):
        raise DataError(f"its {key} is not a list of turns with from and value: {turns!r:.60}")
    found: list[Message] = []
    if isinstance(record.get("system"), str) and record["system"]:
        found.append({"role": "system", "content": record["system"]})
    for at, turn in enumerate(turns, start=1):
        role = turn.get("from", turn.get("role"))
        if not isinstance(role, str) or not {"value", "content"} & turn.keys():
            raise DataError(
                f"turn {at} of its {key} has neither from and value nor role and content: {dict(turn)!r:.60}"
            )
        rest = {name: value for name, value in turn.items() if name not in ("from", "value", "role", "content")}
        content = turn["value"] if "value" in turn else turn["content"]
        found.append(_message({**rest, "role": _ROLES.get(role, role), "content": content}, at))
    return found


def _instruction(record: Record, *, chats: bool) -> Record:
    asked, answered = ("question", "answer") if "instruction" not in record else ("instruction", "output")
    instruction, output = text(record, asked), text(record, answered)
    more = record.get("input") or ""
    if not isinstance(more, str):
        raise DataError(f"its input is not a string: {more!r:.60}")
    if chats:
        system = record.get("system") or ""
        first = [{"role": "system", "content": system}] if system else []
        question = f"{instruction}\n\n{more}" if more else instruction
        spoken = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        return {"messages": [*first, *spoken], "tools": []}
    opening = _ALPACA_INPUT if more else _ALPACA
    context = f"### Input:\n{more}\n\n" if more else ""
    return {
        "prompt": f"{opening}\n\n### Instruction:\n{instruction}\n\n{context}### Response:\n",
        "completion": output,
    }


def _preference(record: Record) -> Record:
    if isinstance(record.get("chosen"), str):
        return {name: text(record, name) for name in ("prompt", "chosen", "rejected")}
    found: dict[str, Any] = {name: messages(record, name) for name in ("chosen", "rejected")}
    if isinstance(record.get("prompt"), str):
        found["prompt"] = [{"role": "user", "content": record["prompt"]}]
    elif record.get("prompt") is not None:
        found["prompt"] = messages(record, "prompt")
    return {**found, "tools": _tools(record)}


def _tokens(record: Record) -> Record:
    tokens = _whole_numbers(record, "input_ids")
    labels = _whole_numbers(record, "labels") if record.get("labels") is not None else list(tokens)
    mask = _whole_numbers(record, "attention_mask") if record.get("attention_mask") is not None else [1] * len(tokens)
    if not len(tokens) == len(labels) == len(mask):
        raise DataError(f"it has {len(tokens)} input_ids, {len(labels)} labels and an attention_mask of {len(mask)}")
    kept = [at for at, seen in enumerate(mask) if seen]  # without padding
    for at in kept:
        if labels[at] not in (-100, tokens[at]):
            raise DataError(
                f"label {at} is {labels[at]}, and the token is {tokens[at]}",
                hint="a label is its own token, or -100 where it is not to be learnt; the shift is the model's",
            )
    return {"input_ids": [tokens[at] for at in kept], "labels": [labels[at] for at in kept]}


def _whole_numbers(record: Record, key: str) -> list[int]:
    value = _value(record, key)
    if not isinstance(value, Sequence) or not all(type(each) is int for each in value):
        raise DataError(f"its {key} is not a list of whole numbers: {value!r:.60}")
    return list(value)
