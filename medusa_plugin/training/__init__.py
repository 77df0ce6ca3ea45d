"""Learning about heads from the target's own text. Needs no vLLM."""
