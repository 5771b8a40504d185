"""What every framework's adapter needs. Knows no framework."""
