"""Parts of bench_gpu.py: generator functions that yield each JSON line once it is measured."""
