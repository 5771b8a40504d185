"""The way of the flag: command line, resolution of the arguments, refusals, hooks."""
