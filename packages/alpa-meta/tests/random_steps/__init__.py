"""Training steps drawn by seed, and how each is compared with the plain step."""
