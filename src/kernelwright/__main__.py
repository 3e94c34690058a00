"""`python -m kernelwright`: the command line where the package is on the path but not installed."""

from __future__ import annotations

import sys

from kernelwright.cli import main

if __name__ == "__main__":
    sys.exit(main())
