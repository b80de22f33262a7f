"""Lower bounds: messages, prices on memory rows, and the strategies that either makes needless."""
