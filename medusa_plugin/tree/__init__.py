"""Candidate trees: their topology, the tokens drafted on them, and how a topology is chosen."""
