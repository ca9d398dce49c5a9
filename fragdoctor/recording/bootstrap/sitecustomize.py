"""Run by the interpreter at its start, because ``fragdoctor run`` put this folder on PYTHONPATH.

It arms the recorder and then makes room: the folder leaves ``sys.path``, and the program's own
``sitecustomize`` is run as if this one were not there. The environment variable stays, so that
children of the program are recorded too. Even an old Python that some child may use has to get
through this file.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    """Load the recording package by its path: the program's Python may not have fragdoctor."""
    home = os.path.dirname(_HERE)
    name = "_fragdoctor_recording"
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(home, "__init__.py"), submodule_search_locations=[home]
    )
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules[name] = package
    spec.loader.exec_module(package)
    options = importlib.import_module(f"{name}.record_options").from_environment()
    if options is not None:
        importlib.import_module(f"{name}.arming").arm(options)


def _step_aside() -> None:
    """Take the folder off the path and run the next ``sitecustomize``, if there is one."""
    sys.path[:] = [p for p in sys.path if os.path.abspath(p or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if sys.version_info >= (3, 9):  # noqa: UP036 - the program's Python, not ours
        _arm()
except Exception:  # the program comes first, whatever happened here
    pass
_step_aside()
