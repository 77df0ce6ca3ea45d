"""Glue to vLLM: the only package that imports it. Start reading at `registration.py`."""
