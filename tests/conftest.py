"""Puts this folder on sys.path (pytest does so for every conftest.py), for `import checkpoints`."""
