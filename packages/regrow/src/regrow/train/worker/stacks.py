"""Stacks of this process's threads, as text."""

import sys
import threading
import traceback

_MOST_FRAMES = 60


def stacks(reason: str) -> str:
    """All threads' stacks, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"=== stacks: {reason} ===\n"]
    for ident, frame in sys._current_frames().items():
        parts.append(f"thread {names.get(ident, ident)}:\n")
        parts.extend(traceback.format_stack(frame)[-_MOST_FRAMES:])
    return "".join(parts)
