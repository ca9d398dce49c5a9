// The extension module. Each part of the core is bound in its own file (bind_*.cpp).
#include <nanobind/nanobind.h>

#if defined(__GLIBC__)
#include <malloc.h>
#endif

namespace nb = nanobind;

void bind_pickle_reader(nb::module_& m);
void bind_allocator(nb::module_& m);
void bind_trace(nb::module_& m);
void bind_replay(nb::module_& m);

namespace {

// Arrays below 32 MiB come from the heap, and glibc keeps the gaps that they leave between live
// ones: after the analysis of a long trace, these are as large as the trace itself.
void return_free_memory() {
#if defined(__GLIBC__)
  nb::gil_scoped_release release;
  malloc_trim(0);
#endif
}

}  // namespace

NB_MODULE(_ext, m) {
  m.doc() = "Native core of fragdoctor: the snapshot reader and the allocator model.";
  // Objects that a program still holds when it ends (in a cache, a notebook, a debugger) are not
  // leaks, and the user cannot help it. There are no cycles to find either: the only Python objects
  // that instances hold are arrays and older instances. The tests switch the warnings on.
  nb::set_leak_warnings(false);
  bind_pickle_reader(m);
  bind_allocator(m);
  bind_trace(m);
  bind_replay(m);
  m.def("warn_of_leaks", &nb::set_leak_warnings, nb::arg("value"),
        "Say on standard error what is still alive when the interpreter ends.");
  m.def("return_free_memory", &return_free_memory,
        "Give freed memory back to the operating system, where the C library keeps it.");
}
