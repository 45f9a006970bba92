"""Encodes a record as tokens with a mask of those to predict: text, prompts, conversations, preferences."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from regrow.core.errors import DataError
from regrow_recipes.recipes import shapes
from regrow_recipes.recipes.shapes import Record

_ABOUT = frozenset({"weight", "train", "training"})
"""Keys of a message that say whether it is trained on, and that are not passed to the template."""


class ChatTokenizer(Protocol):
    """The methods of a transformers tokenizer that are used here."""

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
    """Tokens, with a mask of those that the model has to predict."""

    tokens: list[int]
    counted: list[bool]

    def cut(self, length: int) -> "Document":
        """The first `length` tokens."""
        return Document(self.tokens[:length], self.counted[:length])


class Encoder:
    """Encodes records of one format.

    Args:
        tokenizer: of the model.
        format: of the records.
    """

    def __init__(self, tokenizer: ChatTokenizer, format: str) -> None:
        self._tokenizer, self._format = tokenizer, format
        self._roles: set[str] = set()
        self._knows_tools = False
        self.turns_left_out = 0
        """Number of answers that are not trained on, since the chat template changes them when others follow."""

    def document(self, record: Record) -> Document:
        """Encode a record for training. Raises `DataError` if it lacks a part of its format."""
        found = shapes.canonical(record, self._format, chats=bool(self._tokenizer.chat_template))
        if "input_ids" in found:
            return Document(found["input_ids"], [label >= 0 for label in found["labels"]])
        if "messages" in found:
            return self._conversation(found["messages"], found["tools"])
        if "text" in found:
            tokens = self._ended(self._tokenizer.encode(found["text"]))
            return Document(tokens, [True] * len(tokens))
        prompt, completion = found["prompt"], found["completion"]
        if isinstance(prompt, str):
            return self._answered(prompt, completion)
        return self._conversation([*prompt, *completion], found["tools"], first=len(prompt))

    def pair(self, record: Record) -> tuple[Document, Document]:
        """The preferred answer and the other one, each after the prompt. Raises `DataError`."""
        found = shapes.canonical(record, "preference", chats=bool(self._tokenizer.chat_template))
        chosen, rejected = found["chosen"], found["rejected"]
        if isinstance(chosen, str):
            return self._answered(found["prompt"], chosen), self._answered(found["prompt"], rejected)
        if "prompt" in found:
            before = found["prompt"]
        else:
            common = next(
                (at for at, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other), 0
            )
            before, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
        first, tools = len(before), found["tools"]
        return (
            self._conversation([*before, *chosen], tools, first=first),
            self._conversation([*before, *rejected], tools, first=first),
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

    def _conversation(self, messages: list[shapes.Message], tools: list[Any], first: int = 0) -> Document:
        """Encode a conversation. Trains on the assistant's answers from the message `first` on, unless they opt out.

        The tokens of an answer are those that the template adds for it.
        """
        if not self._tokenizer.chat_template:
            raise DataError(
                "the tokenizer has no chat template to turn a conversation into text",
                hint="use the tokenizer of a model for chat (model.tokenizer), or records with prompt and completion",
            )
        self._roles.update(str(message["role"]) for message in messages)
        tokens = self._rendered(messages, tools, asks=False)
        if tools and not self._knows_tools:
            self._knows_tools = tokens != self._rendered(messages, [], asks=False)
            if not self._knows_tools:
                raise DataError(
                    "the chat template leaves its tools out, so their calls would be learnt without them",
                    hint="use a tokenizer whose template knows tools, or remove `tools` from the records",
                )
        counted = [False] * len(tokens)
        for at, message in enumerate(messages):
            if at < first or message["role"] != "assistant" or not shapes.counts(message):
                continue
            start = self._rendered(messages[:at], tools, asks=True) if at else []
            upto = tokens if at == len(messages) - 1 else self._rendered(messages[: at + 1], tools, asks=False)
            if tokens[: len(start)] != start or tokens[: len(upto)] != upto:
                self.turns_left_out += 1
                continue
            counted[len(start) : len(upto)] = [True] * (len(upto) - len(start))
        return Document(tokens, counted)

    def nothing_counts(self) -> str:
        """Reason why no record has a token to predict, if it is known; else empty."""
        if self._roles and "assistant" not in self._roles:
            return f": its messages have the roles {', '.join(sorted(self._roles))}, and none is assistant"
        return ""

    def _rendered(self, messages: list[shapes.Message], tools: list[Any], *, asks: bool) -> list[int]:
        said = [{name: value for name, value in each.items() if name not in _ABOUT} for each in messages]
        more = {"tools": tools} if tools else {}
        rendered = self._tokenizer.apply_chat_template(
            said, tokenize=True, add_generation_prompt=asks, return_dict=False, **more
        )
        return [int(token) for token in rendered]
