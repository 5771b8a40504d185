"""The demonstration behind `make demo`, and the server harness the tests share with it."""
