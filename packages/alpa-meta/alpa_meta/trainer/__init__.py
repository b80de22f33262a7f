"""The bundled training job: a byte-level GPT on the standard library's source, with checkpoints."""
