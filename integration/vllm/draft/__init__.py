"""Draft models (MTP), and the LM head that ranks share."""
