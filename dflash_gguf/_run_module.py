"""Starts modules in child processes that import nothing from the current folder.

`python -m` and `python -c` search the current folder ahead of the standard library, and a
downloaded model's folder may hold an argparse.py. Python searches the folder of a script instead,
so children run this file as a script, and this file removes its own folder from the search.
`python -P` needs Python 3.11, and `python -I` ignores PYTHONPATH and `pip install --user`; a line
of `python -c` that cleans sys.path comes too late, since Python 3.13 imports linecache before it.
"""

import sys


def module_command(module: str) -> list[str]:
    """Returns the command line that runs a module; append the module's arguments."""
    return [sys.executable, __file__, module]


if __name__ == "__main__":
    # No import may precede the removal of this file's folder, which PYTHONSAFEPATH leaves out.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
