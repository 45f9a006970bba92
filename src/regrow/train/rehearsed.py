"""What a rehearsed body must have done, or people should know that it has not."""

from regrow.core.errors import UsageError
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.standalone import StandaloneWorker
from regrow.train.worker.supervised import SupervisedWorker


def check_update(member: SupervisedWorker | StandaloneWorker, state: ProtectedState) -> None:
    """A body ends. Raises `UsageError` where it has changed parameters past all protected optimizers."""
    if member.rehearsed():
        return
    if state.parameters_changed():
        raise UsageError(
            "the step's body changes protected parameters, but no protected optimizer did",
            hint="protect the optimizer too, or call step.update() before the change",
        )
    if state.optimizers():
        member.note_of_script(
            "the rehearsed body made no update: no protected optimizer has stepped. Where gradients are "
            "gathered over several steps, gather them inside one; where another optimizer steps, protect it"
        )
