"""Draft models (MTP), and the LM head that their ranks share."""
