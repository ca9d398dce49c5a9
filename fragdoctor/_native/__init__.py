"""The native core: snapshot reader and allocator model (C++17, bound as ``_ext``).

Where fragdoctor is installed, the extension is next to this file. A folder of sources, such as a
clone in which somebody ran ``pip install .``, shadows the installed package for programs started in
it and has no extension; it then uses the installed package's extension.
"""

from importlib.util import find_spec

if find_spec(f"{__name__}._ext") is None:
    from fragdoctor._native.shadowed import folder_of_core

    __path__.append(folder_of_core())
