"""What bench_ops.py measures, in reading order: shapes, timing, attention, rivals, compaction."""
