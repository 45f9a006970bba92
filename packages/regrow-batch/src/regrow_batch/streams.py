"""Joins the parts of a streamed answer into the answer as one piece, and detects when it loops. Pure."""

from typing import Any

import msgspec

from regrow_batch.circles import LoopWatch

_JOINED = {"content", "reasoning", "reasoning_content", "refusal", "arguments", "text"}
"""Fields that arrive in pieces, to be concatenated."""
_WATCHED = ("content", "reasoning", "reasoning_content", "refusal", "text")
_OBJECTS = {"chat.completion.chunk": "chat.completion"}


class _Indexed(msgspec.Struct):
    index: int


class StreamedText:
    """Joins the parts of one answer.

    Args:
        chat: true for a chat message, false for a completion's text.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._whole: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._watches: dict[tuple[int, str], LoopWatch] = {}
        self.loop = 0
        """The period of the detected loop; 0: none."""
        self.error: bytes = b""
        """An error event, as received."""

    @property
    def finished(self) -> bool:
        """True if each choice has a finish reason."""
        return bool(self._choices) and all(each.get("finish_reason") for each in self._choices.values())

    def take(self, event: bytes) -> None:
        """Add the JSON of one event. Raises `msgspec.DecodeError`."""
        part = msgspec.json.decode(event, type=dict[str, Any])
        if part.get("error"):
            self.error = event
            return
        choices = msgspec.convert(part.pop("choices", None) or [], list[dict[str, Any]])
        _merge(self._whole, part)
        for choice in choices:
            self._take_choice(choice)

    def _take_choice(self, part: dict[str, Any]) -> None:
        index = msgspec.convert(part.get("index") or 0, int)
        choice = self._choices.setdefault(index, {"index": index})
        delta = msgspec.convert(part.pop("delta", None) or {}, dict[str, Any])
        if self._chat:
            part.pop("message", None)  # a stream has no such field, but the joined answer has
        _merge(choice, part)
        if self._chat:
            _merge(choice.setdefault("message", {"role": "assistant", "content": None}), delta)
        for name in _WATCHED:
            text = delta.get(name) or (part.get(name) if not self._chat else None)
            if isinstance(text, str) and text and not self.loop:
                self.loop = self._watches.setdefault((index, name), LoopWatch()).take(text)

    def body(self) -> bytes:
        """The answer as one piece; for a loop, the text so far, with the finish reason `length`."""
        if self.error:
            return self.error
        whole = dict(self._whole)
        whole["object"] = _OBJECTS.get(str(whole.get("object")), whole.get("object")) or (
            "chat.completion" if self._chat else "text_completion"
        )
        choices = []
        for index in sorted(self._choices):
            choice = self._choices[index]
            if self.loop and not choice.get("finish_reason"):
                choice["finish_reason"] = "length"
            choice.setdefault("logprobs", None)
            choices.append(self._completed(choice))
        return msgspec.json.encode({**whole, "choices": choices, "usage": whole.get("usage")})

    def _completed(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = choice.get("message")
        if message is None or not self._chat:
            return choice if self._chat else {"text": "", **choice}
        # A first part has an empty text where a whole message with only reasoning or tool calls has none.
        others = any(message.get(name) for name in ("reasoning", "reasoning_content", "refusal", "tool_calls"))
        if not message["content"] and others:
            message["content"] = None
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, dict):
                call.pop("index", None)
        return choice


def _merge(known: dict[str, Any], part: dict[str, Any]) -> None:
    """Add the fields of a part: texts and lists are appended, other values replace the earlier ones."""
    for name, value in part.items():
        before = known.get(name)
        if value is None:
            known.setdefault(name, None)
        elif isinstance(value, str) and isinstance(before, str) and name in _JOINED:
            known[name] = before + value
        elif isinstance(value, dict) and isinstance(before, dict) and name != "usage":
            _merge(before, value)
        elif isinstance(value, list) and all(isinstance(each, dict) and "index" in each for each in value):
            known[name] = _merged_by_index(before if isinstance(before, list) else [], value)
        elif isinstance(value, list) and isinstance(before, list):
            before.extend(value)
        else:
            known[name] = value


def _merged_by_index(known: list[dict[str, Any]], parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_index = {_index_of(each): each for each in known}
    for part in parts:
        _merge(by_index.setdefault(_index_of(part), {}), part)
    return list(by_index.values())


def _index_of(part: object) -> int:
    """Index of a part. Raises `msgspec.ValidationError` if it has none."""
    return msgspec.convert(part, _Indexed).index
