"""From a user's step to a program: traced, inputs named, phases found, batches followed."""
