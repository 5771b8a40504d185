"""The dispatchers that take the place of SGLang's, and the formats in which rows travel."""
