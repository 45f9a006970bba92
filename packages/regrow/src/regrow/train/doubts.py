"""Doubts of adapters: something after a fault is not as it was, and no protected state could have had it."""

from regrow.train.session import Session


def doubt(session: Session, reason: str) -> None:
    """The result may not be that of a run without faults: the job says `reason`, and ends with 76 in the place of 0."""
    session._worker.note_of_script(reason, doubts=True)  # noqa: SLF001 - Session is what scripts see; this is not
