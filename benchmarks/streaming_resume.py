"""Time until the first batch of a new process with mosaicml-streaming; `data.py` starts this.

    python benchmarks/streaming_resume.py CORPUS.bin FOLDER LENGTH BATCH_SIZE ROUNDS STEP...

It can run in another environment than regrow: it needs numpy, torch and streaming. The samples are those of `data.py`,
written as a local data set in FOLDER. The new process is forked from this one, so that its imports are done when its
clock starts. Prints one line of JSON at the end: the seconds of each step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import streaming  # type: ignore[import-not-found,unused-ignore]
from streaming.base.util import clean_stale_shared_memory  # type: ignore[import-not-found,unused-ignore]

SEED = 1


def write_samples(corpus: Path, folder: Path, length: int, samples: int) -> None:
    """Write the first samples of the corpus."""
    tokens = np.memmap(corpus, np.uint16, mode="r")
    columns = {"tokens": f"ndarray:uint16:{length + 1}"}
    with streaming.MDSWriter(out=str(folder), columns=columns) as out:
        for index in range(samples):
            out.write({"tokens": np.array(tokens[index * length : (index + 1) * length + 1])})


def open_loader(folder: Path, batch_size: int) -> Any:
    """The loader, made as in its documentation."""
    dataset = streaming.StreamingDataset(local=str(folder), batch_size=batch_size, shuffle=True, shuffle_seed=SEED)
    return streaming.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=1, persistent_workers=True)


def first_batch(folder: Path, batch_size: int, state: dict[str, Any] | None) -> list[Any]:
    """Seconds until the first batch, and the loader's state after it. `state`: to resume from; None: from 0."""
    began = time.perf_counter()
    loader = open_loader(folder, batch_size)
    if state is not None:
        loader.load_state_dict(state)
    batches = iter(loader)
    batch = next(batches)
    seconds = time.perf_counter() - began
    if len(batch["tokens"]) != batch_size:
        raise RuntimeError(f"a batch of {len(batch['tokens'])} samples")
    told = loader.state_dict()
    loader._iterator._shutdown_workers()
    return [seconds, told]


def in_new_process(folder: Path, batch_size: int, state: dict[str, Any] | None) -> Any:
    """Result of `first_batch` in a newly forked process."""
    said, out = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(out, json.dumps(first_batch(folder, batch_size, state)).encode())
        finally:
            os._exit(0)
    os.close(out)
    with open(said, "rb") as answer:
        line = answer.read()
    os.waitpid(pid, 0)
    clean_stale_shared_memory()  # a process that died leaves it behind
    return json.loads(line)


def main() -> None:
    """Measure and print."""
    corpus, folder = map(Path, sys.argv[1:3])
    length, batch_size, rounds, *steps = map(int, sys.argv[3:])
    write_samples(corpus, folder, length, (max(steps) + 2) * batch_size)
    clean_stale_shared_memory()
    _, state = in_new_process(folder, batch_size, None)
    seconds: dict[int, list[float]] = {step: [] for step in steps}
    for _ in range(rounds):
        for step in steps:
            place = state | {"sample_in_epoch": step * batch_size}
            took, after = in_new_process(folder, batch_size, place)
            if after["sample_in_epoch"] != (step + 1) * batch_size:
                raise RuntimeError(f"it went on at {after}, not at step {step}")
            seconds[step].append(took)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
