"""An LM head that ranks share."""
