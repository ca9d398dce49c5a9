#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_replay(nb::module_& m) { (void)m; }
