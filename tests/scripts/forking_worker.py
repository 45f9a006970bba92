"""A server that forks engines, as vLLM does: one in a session of its own, one whose parent ends.

`python forking_worker.py PORT MARK`; `MARK` stands in the command line of each.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

FAKE = str(Path(__file__).parent / "fake_worker.py")
ENGINE = "import time; time.sleep(3600)"


def main() -> None:
    _, port, mark = sys.argv
    print("noise of a server", flush=True)
    engine = [sys.executable, "-c", ENGINE, f"{mark} engine"]
    subprocess.Popen(engine, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(engine, start_new_session=True)
        os._exit(0)
    sys.argv = [FAKE, port, "--latency", "0.05"]
    runpy.run_path(FAKE, run_name="__main__")


if __name__ == "__main__":
    main()
