"""What `make upstream-tests` runs."""

from __future__ import annotations

import signal
import sys

from .cli import main

# As Ctrl-C: the tests' processes, which have sessions of their own, are ended before.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
raise SystemExit(main(sys.argv[1:]))
