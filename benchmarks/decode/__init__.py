"""Parts of bench_decode.py: decoding with trees beside plain vLLM and its own speculation."""
