"""``python -m vkvmap`` is the command line."""

import sys

from vkvmap.cli import main

if __name__ == "__main__":
    sys.exit(main())
