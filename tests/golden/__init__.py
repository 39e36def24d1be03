"""Results of fixed inputs that every change of the inside must give again, to the bit (results.json)."""
