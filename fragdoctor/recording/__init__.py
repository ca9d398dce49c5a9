"""Code that runs inside the user's program: only the standard library and the program's torch.

These files are loaded by path into interpreters that may have neither fragdoctor nor its
dependencies (``bootstrap/sitecustomize.py``), from Python 3.9 on. So they import only each other,
by relative imports, and nothing they do may change what the program does or prints.
"""
