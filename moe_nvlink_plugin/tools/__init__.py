"""Commands for a shell."""
