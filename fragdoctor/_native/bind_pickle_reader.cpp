#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_pickle_reader(nb::module_& m) { (void)m; }
