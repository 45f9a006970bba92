"""Reports by adapters that, after a fault, something may differ that protected state could not contain."""

from regrow.train.session import Session


def doubt(session: Session, reason: str) -> None:
    """Report that the result may differ from a run without faults, for `reason`: the job exits with 76 instead of 0."""
    session._worker.note_of_script(reason, doubts=True)  # noqa: SLF001 - Session is what scripts see; this is not
