"""Differential fuzzing: random requests through Medusa and through plain vLLM, all compared."""
