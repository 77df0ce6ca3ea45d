"""What the benchmarks share: the circumstances of a result, and how it gets into the docs."""
