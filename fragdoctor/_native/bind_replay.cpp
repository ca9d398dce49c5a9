// Python's view of the undone trace and the replay. Columns in, numpy arrays out; the GIL is
// released while native code runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <utility>

#include "trace_undo.h"

namespace nb = nanobind;
using namespace fragdoctor;

namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const char* const CONTRADICTION_NAMES[] = {
    "alloc_over_live", "free_of_free",           "completed_unrequested",
    "segment_overlap", "segment_absent",         "block_outside_segments",
    "blocks_overlap",  "end_differs",            "bad_size",
};
static_assert(std::size(CONTRADICTION_NAMES) == static_cast<std::size_t>(Contradiction::count));

template <class T>
nb::object array_of(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

template <class T, class Items, class Get>
nb::object column_of(const Items& items, Get&& get) {
  std::vector<T> values;
  values.reserve(items.size());
  for (const auto& item : items) values.push_back(static_cast<T>(get(item)));
  return array_of(std::move(values));
}

void check_length(std::size_t n, std::size_t expected, const char* what) {
  if (n != expected) throw std::invalid_argument(std::string("columns differ in length: ") + what);
}

nb::dict undone_dict(UndoneTrace&& u, bool pools_given) {
  nb::dict d;
  d["segment_address"] = column_of<std::uint64_t>(u.segments, [](auto& s) { return s.address; });
  d["segment_bytes"] = column_of<std::uint64_t>(u.segments, [](auto& s) { return s.size; });
  d["segment_stream"] = column_of<std::int32_t>(u.segments, [](auto& s) { return s.stream; });
  d["segment_pool"] = column_of<std::int32_t>(u.segments, [](auto& s) { return s.pool; });
  d["segment_is_small"] = column_of<std::uint8_t>(u.segments, [](auto& s) { return s.is_small; });
  d["segment_is_expandable"] =
      column_of<std::uint8_t>(u.segments, [](auto& s) { return s.is_expandable; });
  d["block_address"] = column_of<std::uint64_t>(u.blocks, [](auto& b) { return b.address; });
  d["block_size"] = column_of<std::uint64_t>(u.blocks, [](auto& b) { return b.size; });
  d["block_requested"] = column_of<std::uint64_t>(u.blocks, [](auto& b) { return b.requested; });
  d["block_is_pending"] = column_of<std::uint8_t>(u.blocks, [](auto& b) { return b.is_pending; });
  d["block_size_is_known"] =
      column_of<std::uint8_t>(u.blocks, [](auto& b) { return b.size_is_known; });
  d["event_block_bytes"] = array_of(std::move(u.block_bytes));
  d["event_pool"] = pools_given ? nb::none() : array_of(std::move(u.pool));
  d["allocated_bytes"] = array_of(std::move(u.allocated));
  d["active_bytes"] = array_of(std::move(u.active));
  d["reserved_bytes"] = array_of(std::move(u.reserved));
  d["initial_allocated_bytes"] = u.initial_allocated;
  d["initial_active_bytes"] = u.initial_active;
  d["initial_reserved_bytes"] = u.initial_reserved;
  d["allocated_error_bytes"] = u.allocated_error;
  d["active_error_bytes"] = u.active_error;
  d["reserved_error_bytes"] = u.reserved_error;
  nb::dict contradictions;
  for (std::size_t i = 0; i < u.contradictions.size(); ++i)
    if (u.contradictions[i] > 0) contradictions[CONTRADICTION_NAMES[i]] = u.contradictions[i];
  d["contradictions"] = contradictions;
  return d;
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.def(
      "undo",
      [](Column<std::uint8_t> action, Column<std::uint64_t> address, Column<std::uint64_t> size,
         Column<std::int32_t> stream, Column<std::int32_t> pool,
         Column<std::uint64_t> segment_address, Column<std::uint64_t> segment_size,
         Column<std::int32_t> segment_stream, Column<std::int32_t> segment_pool,
         Column<std::uint8_t> segment_kind, Column<std::uint8_t> segment_expandable,
         Column<std::uint64_t> block_address, Column<std::uint64_t> block_size,
         Column<std::uint64_t> block_requested, Column<std::uint8_t> block_state,
         std::uint64_t max_split_bytes, std::uint64_t max_non_split_rounding_bytes,
         std::uint64_t large_segment_bytes, const std::vector<std::uint32_t>& divisions) {
        const std::size_t n = action.shape(0), ns = segment_address.shape(0),
                          nbk = block_address.shape(0);
        for (std::size_t k : {address.shape(0), size.shape(0), stream.shape(0), pool.shape(0)})
          check_length(k, n, "events");
        for (std::size_t k : {segment_size.shape(0), segment_stream.shape(0),
                              segment_pool.shape(0), segment_kind.shape(0),
                              segment_expandable.shape(0)})
          check_length(k, ns, "segments");
        for (std::size_t k : {block_size.shape(0), block_requested.shape(0), block_state.shape(0)})
          check_length(k, nbk, "blocks");
        check_length(divisions.size(), 16, "divisions");
        Settings settings;
        settings.max_split_bytes = max_split_bytes;
        settings.max_non_split_rounding_bytes = max_non_split_rounding_bytes;
        settings.large_segment_bytes = large_segment_bytes;
        for (std::size_t i = 0; i < 16; ++i) settings.roundup_power2_divisions[i] = divisions[i];
        TraceView trace{n, action.data(), address.data(), size.data(), stream.data(), pool.data()};
        FinalState end;
        end.n_segments = ns;
        end.segment_address = segment_address.data();
        end.segment_size = segment_size.data();
        end.segment_stream = segment_stream.data();
        end.segment_pool = segment_pool.data();
        end.segment_kind = segment_kind.data();
        end.segment_expandable = segment_expandable.data();
        end.n_blocks = nbk;
        end.block_address = block_address.data();
        end.block_size = block_size.data();
        end.block_requested = block_requested.data();
        end.block_state = block_state.data();
        UndoneTrace undone;
        {
          nb::gil_scoped_release release;
          undone = undo_trace(trace, end, settings);
        }
        const bool pools_given = undone.pool.empty();
        return undone_dict(std::move(undone), pools_given);
      },
      nb::arg("action"), nb::arg("address"), nb::arg("size"), nb::arg("stream"), nb::arg("pool"),
      nb::arg("segment_address"), nb::arg("segment_size"), nb::arg("segment_stream"),
      nb::arg("segment_pool"), nb::arg("segment_kind"), nb::arg("segment_expandable"),
      nb::arg("block_address"), nb::arg("block_size"), nb::arg("block_requested"),
      nb::arg("block_state"), nb::arg("max_split_bytes"), nb::arg("max_non_split_rounding_bytes"),
      nb::arg("large_segment_bytes"), nb::arg("divisions"),
      "Undo a device's trace from its final segments; see trace_ops.undo for the meaning.");
}
