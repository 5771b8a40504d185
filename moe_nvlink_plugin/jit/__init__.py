"""From a configuration to machine code: one source text, two compilers, one cache.

The text of a translation unit is part of its key in the cache. Whatever shapes the code stands in
the text; whatever changes from call to call is an argument.
"""
