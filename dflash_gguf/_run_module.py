"""Starts modules in child processes that import nothing from the current folder.

`python -m` and `python -c` put the current folder before the standard library on sys.path, and the
folder of a downloaded model may hold an argparse.py. A script puts its own folder there instead, so
child processes run this file as a script, which removes its folder from sys.path. `python -P` needs
Python 3.11, and `python -I` ignores PYTHONPATH and `pip install --user`. Code of `python -c` could
not clean sys.path in time: Python 3.13 imports linecache before it runs.
"""

import sys


def module_command(module: str) -> list[str]:
    """Returns the command line that runs a module; the caller appends the module's arguments."""
    return [sys.executable, __file__, module]


if __name__ == "__main__":
    # Remove this file's folder before any import. With PYTHONSAFEPATH it is not on sys.path.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
