"""Parts of bench_gpu.py: generator functions that yield figures as soon as they are measured."""
