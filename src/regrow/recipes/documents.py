"""From a record of a file to tokens, and which of them count: text, prompts, conversations, preferences."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from regrow.core.errors import DataError

Record = Mapping[str, Any]
Messages = Sequence[Mapping[str, Any]]


class ChatTokenizer(Protocol):
    """What is used of a tokenizer of transformers."""

    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Tokens of a text."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Tokens of a conversation."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class Document(NamedTuple):
    """Tokens, and which of them the model has to predict."""

    tokens: list[int]
    counted: list[bool]

    def cut(self, length: int) -> "Document":
        """Its beginning."""
        return Document(self.tokens[:length], self.counted[:length])


def detect(record: Record) -> str:
    """What a record is, by its keys. Raises `DataError`."""
    if {"chosen", "rejected"} <= record.keys():
        return "preference"
    if "messages" in record:
        return "messages"
    if {"prompt", "completion"} <= record.keys():
        return "prompt-completion"
    if "text" in record:
        return "text"
    raise DataError(
        f"a record has the keys {', '.join(sorted(record))}, and none of the formats that are known",
        hint="text; messages; prompt and completion; or prompt, chosen and rejected",
    )


class Encoder:
    """Encodes records of one format.

    Args:
        tokenizer: of the model.
        format: what the records are.
    """

    def __init__(self, tokenizer: ChatTokenizer, format: str) -> None:
        self._tokenizer, self._format = tokenizer, format
        self.turns_left_out = 0
        """Answers that the chat template rewrites when others follow, so that they cannot count."""

    def document(self, record: Record) -> Document:
        """A record to be learnt. Raises `DataError` where it has not what its format needs."""
        match self._format:
            case "text":
                tokens = self._ended(self._tokenizer.encode(_text(record, "text")))
                return Document(tokens, [True] * len(tokens))
            case "prompt-completion" if isinstance(record.get("prompt"), str):
                return self._answered(_text(record, "prompt"), _text(record, "completion"))
            case "prompt-completion":
                prompt, completion = _messages(record, "prompt"), _messages(record, "completion")
                return self._conversation([*prompt, *completion], first=len(prompt))
            case _:
                return self._conversation(_messages(record, "messages"))

    def pair(self, record: Record) -> tuple[Document, Document]:
        """The answer that was preferred, and the other one, each behind the prompt. Raises `DataError`."""
        if isinstance(record.get("chosen"), str):
            prompt = _text(record, "prompt")
            return self._answered(prompt, _text(record, "chosen")), self._answered(prompt, _text(record, "rejected"))
        chosen, rejected = _messages(record, "chosen"), _messages(record, "rejected")
        if "prompt" in record:
            before: list[Any] = list(_messages(record, "prompt"))
        else:
            common = next(
                (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), 0
            )
            before, chosen, rejected = list(chosen[:common]), chosen[common:], rejected[common:]
        first = len(before)
        return (
            self._conversation([*before, *chosen], first=first),
            self._conversation([*before, *rejected], first=first),
        )

    def _answered(self, prompt: str, answer: str) -> Document:
        asked = self._tokenizer.encode(prompt)
        if asked and asked[-1] == self._tokenizer.eos_token_id:
            asked.pop()  # some tokenizers end every text
        said = self._ended(self._tokenizer.encode(answer, add_special_tokens=False))
        return Document(asked + said, [False] * len(asked) + [True] * len(said))

    def _ended(self, tokens: list[int]) -> list[int]:
        end = self._tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]

    def _conversation(self, messages: Messages, first: int = 0) -> Document:
        """The answers of the assistant count, from the message `first` on.

        What an answer consists of is seen by what the template adds for it.
        """
        if not self._tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template, so a conversation has no one form",
                hint="use the tokenizer of a model for chat (model.tokenizer), or records with prompt and completion",
            )
        tokens = self._rendered(messages, asks=False)
        counted = [False] * len(tokens)
        for at, message in enumerate(messages):
            if at < first or message.get("role") != "assistant":
                continue
            start = self._rendered(messages[:at], asks=True) if at else []
            upto = tokens if at == len(messages) - 1 else self._rendered(messages[: at + 1], asks=False)
            if tokens[: len(start)] != start or tokens[: len(upto)] != upto:
                self.turns_left_out += 1
                continue
            counted[len(start) : len(upto)] = [True] * (len(upto) - len(start))
        return Document(tokens, counted)

    def _rendered(self, messages: Messages, *, asks: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=asks, return_dict=False
        )
        return [int(token) for token in rendered]


def _text(record: Record, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"its {key} is no text: {value!r:.60}")
    return value


def _messages(record: Record, key: str) -> Messages:
    value = record.get(key)
    if (
        not isinstance(value, Sequence)
        or isinstance(value, str)
        or not all(isinstance(each, Mapping) and "role" in each and "content" in each for each in value)
    ):
        raise DataError(f"its {key} is no list of messages with role and content: {value!r:.60}")
    return value
