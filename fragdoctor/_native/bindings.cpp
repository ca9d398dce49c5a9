// The extension module. Each part of the core binds itself in a file of its own (bind_*.cpp).
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_pickle_reader(nb::module_& m);
void bind_allocator(nb::module_& m);
void bind_replay(nb::module_& m);

NB_MODULE(_ext, m) {
  m.doc() = "Native core of fragdoctor: the snapshot reader and the allocator model.";
  bind_pickle_reader(m);
  bind_allocator(m);
  bind_replay(m);
}
