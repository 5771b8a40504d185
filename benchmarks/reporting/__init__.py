"""Parts of report.py: result files, tables, goals."""
