"""The ops on graphics processors: what runs them, and what they are compiled to."""
