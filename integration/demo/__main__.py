"""`python -m moe_nvlink_plugin.integration.demo`, which is what `make demo` runs."""

from .demo import main

raise SystemExit(main())
