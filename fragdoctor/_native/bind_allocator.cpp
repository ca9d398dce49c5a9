#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_allocator(nb::module_& m) { (void)m; }
