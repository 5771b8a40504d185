"""What report.py is made of: result files, documents with blocks, tables, goals, plots."""
