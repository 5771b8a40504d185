"""Adapters for serving frameworks; nothing in the package imports them."""
