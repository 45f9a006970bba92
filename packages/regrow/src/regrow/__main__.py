"""`python -m regrow`: the command line, for an environment in which the `regrow` script is not on the path."""

import sys

from regrow.cli import main

if __name__ == "__main__":
    sys.exit(main())
