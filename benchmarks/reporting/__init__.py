"""What report.py is made of: result files, tables, goals."""
