"""The native core: snapshot reader and allocator model (C++17, bound as ``_ext``)."""
