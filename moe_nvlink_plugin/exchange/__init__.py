"""Dispatch and combine of one layer."""
