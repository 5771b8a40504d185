"""How recipes and transports are found."""
