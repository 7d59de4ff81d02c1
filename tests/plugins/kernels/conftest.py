"""Tests in Triton's interpreter are run by `unit/test_interpreted.py`, in own processes."""

collect_ignore = ["interpreted"]
