"""What lies where in symmetric memory, and what a kernel reports there."""
