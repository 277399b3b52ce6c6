"""Parts of bench_gpu.py, one a file: each yields its figures as it has them."""
