"""What measures a loaded `Model`: speed, length, identity, likelihood, repetition."""
