"""Imported last by the process that worlds are forked from."""

from tests.forking import prepare_to_fork
from tqdm import tqdm

# torch.compile's progress bars make this lock. One of a forked process would have a name in shared memory, which stays
# where the process is killed, until the one that it was forked from ends.
tqdm.get_lock()
prepare_to_fork()
