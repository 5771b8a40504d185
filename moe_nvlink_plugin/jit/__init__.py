"""From a configuration to machine code: one source text, two compilers, one cache.

The text of a translation unit is its own cache key: what shapes the code stands in the text, what
changes from call to call is an argument.
"""
