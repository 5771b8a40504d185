"""Tools of ours that let SGLang serve on CPU; `make sglang-env` makes the environment of them."""
