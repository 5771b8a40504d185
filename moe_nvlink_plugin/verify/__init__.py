"""moe-nvlink verify: rounds against the reference, and a table beside what a user would take."""
