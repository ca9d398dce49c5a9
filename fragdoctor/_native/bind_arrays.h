// Columns exchanged between numpy and the core.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace fragdoctor {

template <class T>
using InColumn =
    nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// A numpy array that takes ownership of the values.
template <class T>
nanobind::object array_of(std::vector<T>&& values) {
  namespace nb = nanobind;
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

// A read-only numpy array over values that `owner` keeps alive. `As` has the size of the values.
template <class As, class T>
nanobind::object view_of(const std::vector<T>& values, nanobind::handle owner) {
  namespace nb = nanobind;
  static_assert(sizeof(As) == sizeof(T));
  return nb::cast(nb::ndarray<nb::numpy, const As, nb::ndim<1>>(
      reinterpret_cast<const As*>(values.data()), {values.size()}, owner));
}

// A numpy array of one field of many records.
template <class T, class Items, class Get>
nanobind::object column_of(const Items& items, Get&& get) {
  std::vector<T> values;
  values.reserve(items.size());
  for (const auto& item : items) values.push_back(static_cast<T>(get(item)));
  return array_of(std::move(values));
}

}  // namespace fragdoctor
