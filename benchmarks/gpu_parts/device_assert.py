"""Part 2: a sticky CUDA error in a body without buffers, in one with buffers, and in a newcomer before its loop."""

import sys

from gpu_parts.jobs import LIMIT_S, Job, play, same


def main() -> int:
    """Run these jobs at once, together with undisturbed ones."""
    none, buffers = Job("none", options=()), Job("none_buffers", options=())
    plain, held, comes = Job("assert"), Job("assert_buffers"), Job("newcomer")
    play([none, buffers, plain, held, comes], LIMIT_S - 5)
    return 0 if all([same([plain, comes], none), same([held], buffers)]) else 1


if __name__ == "__main__":
    sys.exit(main())
