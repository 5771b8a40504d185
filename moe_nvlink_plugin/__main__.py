"""`python -m moe_nvlink_plugin`: the console script, for launchers that start modules."""

from __future__ import annotations

import sys

from .tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
