// Python's view of the undone trace. Columns in, numpy arrays out; the GIL is released while native
// code runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "native_trace.h"

namespace nb = nanobind;

namespace fragdoctor {
namespace {

const char* const CONTRADICTION_NAMES[] = {
    "alloc_over_live", "free_of_free",   "completed_unrequested",  "never_completed",
    "segment_overlap", "segment_absent", "block_outside_segments", "blocks_overlap",
    "end_differs",     "bad_size",
};
static_assert(std::size(CONTRADICTION_NAMES) == static_cast<std::size_t>(Contradiction::count));

void check_length(std::size_t n, std::size_t expected, const char* what) {
  if (n != expected) throw std::invalid_argument(std::string("columns differ in length: ") + what);
}

Total total_of(const std::string& name) {
  if (name == "allocated_bytes") return Total::allocated;
  if (name == "active_bytes") return Total::active;
  if (name == "reserved_bytes") return Total::reserved;
  throw nb::value_error("no such total");
}

// Facts about the whole trace, and about the device before its first event.
nb::dict facts(const NativeTrace& t) {
  const UndoneTrace& u = t.undone;
  nb::dict d, contradictions;
  for (std::size_t i = 0; i < u.contradictions.size(); ++i)
    if (u.contradictions[i] > 0) contradictions[CONTRADICTION_NAMES[i]] = u.contradictions[i];
  d["contradictions"] = contradictions;
  d["missing"] = nb::make_tuple(u.missing[0], u.missing[1], u.missing[2]);
  const auto peak = [](const Peak& p) { return nb::make_tuple(p.bytes, p.state); };
  d["peak_allocated"] = peak(u.peak_allocated);
  d["peak_active"] = peak(u.peak_active);
  d["peak_reserved"] = peak(u.peak_reserved);
  d["initial_allocated_bytes"] = u.initial_allocated;
  d["initial_active_bytes"] = u.initial_active;
  d["initial_reserved_bytes"] = u.reserved.initial;
  d["n_initial"] = u.lives.n_initial;
  d["n_regular"] = u.lives.n_regular;
  return d;
}

nb::dict initial_dict(const NativeTrace& t) {
  const auto& blocks = t.undone.initial_blocks;
  const auto& segments = t.undone.initial_segments;
  nb::dict d;
  d["segment_address"] = column_of<std::uint64_t>(segments, [](auto& s) { return s.address; });
  d["segment_bytes"] = column_of<std::uint64_t>(segments, [](auto& s) { return s.size; });
  d["segment_stream"] = column_of<std::int32_t>(segments, [](auto& s) { return s.kind.stream; });
  d["segment_pool"] = column_of<std::int32_t>(segments, [](auto& s) { return s.kind.pool; });
  d["segment_is_small"] =
      column_of<std::uint8_t>(segments, [](auto& s) { return s.kind.is_small; });
  d["segment_is_expandable"] =
      column_of<std::uint8_t>(segments, [](auto& s) { return s.kind.is_expandable; });
  d["block_address"] = column_of<std::uint64_t>(blocks, [](auto& b) { return b.address; });
  d["block_bytes"] = column_of<std::uint64_t>(blocks, [](auto& b) { return b.size; });
  d["block_requested"] = column_of<std::uint64_t>(blocks, [](auto& b) { return b.requested; });
  d["block_is_pending"] = column_of<std::uint8_t>(blocks, [](auto& b) { return b.is_pending; });
  d["block_size_is_known"] =
      column_of<std::uint8_t>(blocks, [](auto& b) { return b.size_is_known; });
  return d;
}

// The columns of `Lives`, without a copy.
nb::dict lives_dict(nb::handle_t<NativeTrace> self) {
  const Lives& l = nb::cast<const NativeTrace&>(self).undone.lives;
  nb::dict d;
  d["start"] = view_of<std::int32_t>(l.start, self);
  d["free"] = view_of<std::int32_t>(l.free, self);
  d["done"] = view_of<std::int32_t>(l.done, self);
  d["named"] = view_of<std::int32_t>(l.named, self);
  d["size"] = view_of<std::int64_t>(l.size, self);
  d["block"] = view_of<std::int32_t>(l.block, self);
  return d;
}

nb::dict segments_dict(const NativeTrace& t) {
  const auto& s = t.undone.segments;
  nb::dict d;
  d["address"] = column_of<std::uint64_t>(s, [](auto& x) { return x.address; });
  d["size"] = column_of<std::int64_t>(s, [](auto& x) { return x.size; });
  d["start"] = column_of<std::int32_t>(s, [](auto& x) { return x.start; });
  d["done"] = column_of<std::int32_t>(s, [](auto& x) { return x.done; });
  d["stream"] = column_of<std::int32_t>(s, [](auto& x) { return x.kind.stream; });
  d["pool"] = column_of<std::int32_t>(s, [](auto& x) { return x.kind.pool; });
  d["is_small"] = column_of<std::uint8_t>(s, [](auto& x) { return x.kind.is_small; });
  d["is_expandable"] = column_of<std::uint8_t>(s, [](auto& x) { return x.kind.is_expandable; });
  return d;
}

nb::object total(const NativeTrace& t, const std::string& name) {
  const Total which = total_of(name);
  std::vector<std::int64_t> column;
  {
    nb::gil_scoped_release release;
    column = total_column(t.trace, t.undone, which);
  }
  return array_of(std::move(column));
}

nb::object totals_in(const NativeTrace& t, InColumn<std::int64_t> states) {
  std::vector<std::int64_t> values;
  {
    nb::gil_scoped_release release;
    values = totals_at(t.trace, t.undone, states.data(), states.shape(0));
  }
  return array_of(std::move(values));
}

// Rows at which reserved memory changes, and its value after each.
nb::tuple reserved_changes(nb::handle_t<NativeTrace> self) {
  const ReservedSteps& steps = nb::cast<const NativeTrace&>(self).undone.reserved;
  return nb::make_tuple(view_of<std::int32_t>(steps.rows, self),
                        view_of<std::int64_t>(steps.bytes, self));
}

nb::tuple envelope_of(const NativeTrace& t, const std::string& name,
                      InColumn<std::int64_t> starts) {
  const Total which = total_of(name);
  Envelope e;
  {
    nb::gil_scoped_release release;
    e = envelope(t.trace, t.undone, which, starts.data(), starts.shape(0));
  }
  return nb::make_tuple(array_of(std::move(e.low)), array_of(std::move(e.high)));
}

nb::dict layout_dict(const NativeTrace& t, std::int32_t state) {
  DeviceLayout l;
  {
    nb::gil_scoped_release release;
    l = layout_at(t.trace, t.end, t.undone, state);
  }
  nb::dict d;
  d["segment_stream"] = column_of<std::int32_t>(l.segment_kind, [](auto& k) { return k.stream; });
  d["segment_pool"] = column_of<std::int32_t>(l.segment_kind, [](auto& k) { return k.pool; });
  d["segment_is_small"] =
      column_of<std::uint8_t>(l.segment_kind, [](auto& k) { return k.is_small; });
  d["segment_is_expandable"] =
      column_of<std::uint8_t>(l.segment_kind, [](auto& k) { return k.is_expandable; });
  d["segment_address"] = array_of(std::move(l.segment_address));
  d["segment_bytes"] = array_of(std::move(l.segment_bytes));
  d["live"] = array_of(std::move(l.live));
  d["live_segment"] = array_of(std::move(l.live_segment));
  d["free_address"] = array_of(std::move(l.free_address));
  d["free_bytes"] = array_of(std::move(l.free_bytes));
  d["free_segment"] = array_of(std::move(l.free_segment));
  return d;
}

}  // namespace

NativeTrace::NativeTrace(InColumn<std::uint8_t> action, InColumn<std::uint64_t> address,
                         InColumn<std::uint64_t> size, InColumn<std::int32_t> stream,
                         InColumn<std::int32_t> pool, InColumn<std::uint64_t> segment_address,
                         InColumn<std::uint64_t> segment_size,
                         InColumn<std::int32_t> segment_stream, InColumn<std::int32_t> segment_pool,
                         InColumn<std::uint8_t> segment_kind,
                         InColumn<std::uint8_t> segment_expandable,
                         InColumn<std::uint64_t> block_address, InColumn<std::uint64_t> block_size,
                         InColumn<std::uint64_t> block_requested,
                         InColumn<std::uint8_t> block_state, const Config& config)
    : kept_(nb::make_tuple(action, address, size, stream, pool, segment_address, segment_size,
                           segment_stream, segment_pool, segment_kind, segment_expandable,
                           block_address, block_size, block_requested, block_state)),
      settings(config.settings) {
  const std::size_t n = action.shape(0), n_segments = segment_address.shape(0),
                    n_blocks = block_address.shape(0);
  for (std::size_t k : {address.shape(0), size.shape(0), stream.shape(0), pool.shape(0)})
    check_length(k, n, "events");
  for (std::size_t k : {segment_size.shape(0), segment_stream.shape(0), segment_pool.shape(0),
                        segment_kind.shape(0), segment_expandable.shape(0)})
    check_length(k, n_segments, "segments");
  for (std::size_t k : {block_size.shape(0), block_requested.shape(0), block_state.shape(0)})
    check_length(k, n_blocks, "blocks");
  trace = {n, action.data(), address.data(), size.data(), stream.data(), pool.data()};
  end = {n_segments,
         segment_address.data(),
         segment_size.data(),
         segment_stream.data(),
         segment_pool.data(),
         segment_kind.data(),
         segment_expandable.data(),
         n_blocks,
         block_address.data(),
         block_size.data(),
         block_requested.data(),
         block_state.data()};
  nb::gil_scoped_release release;
  undone = undo_trace(trace, end, settings);
}

}  // namespace fragdoctor

void bind_trace(nb::module_& m) {
  using namespace fragdoctor;
  nb::list actions, states, types;
  for (const char* name : ACTION_NAMES) actions.append(name);
  for (const char* name : STATE_NAMES) states.append(name);
  for (const char* name : TYPE_NAMES) types.append(name);
  m.attr("ACTION_NAMES") = nb::tuple(actions);
  m.attr("STATE_NAMES") = nb::tuple(states);
  m.attr("TYPE_NAMES") = nb::tuple(types);
  m.attr("BEFORE") = BEFORE;
  m.attr("NEVER") = NEVER;
  nb::class_<NativeTrace>(m, "NativeTrace")
      .def(nb::init<InColumn<std::uint8_t>, InColumn<std::uint64_t>, InColumn<std::uint64_t>,
                    InColumn<std::int32_t>, InColumn<std::int32_t>, InColumn<std::uint64_t>,
                    InColumn<std::uint64_t>, InColumn<std::int32_t>, InColumn<std::int32_t>,
                    InColumn<std::uint8_t>, InColumn<std::uint8_t>, InColumn<std::uint64_t>,
                    InColumn<std::uint64_t>, InColumn<std::uint64_t>, InColumn<std::uint8_t>,
                    const Config&>(),
           nb::arg("action"), nb::arg("address"), nb::arg("size"), nb::arg("stream"),
           nb::arg("pool"), nb::arg("segment_address"), nb::arg("segment_size"),
           nb::arg("segment_stream"), nb::arg("segment_pool"), nb::arg("segment_kind"),
           nb::arg("segment_expandable"), nb::arg("block_address"), nb::arg("block_size"),
           nb::arg("block_requested"), nb::arg("block_state"), nb::arg("config"))
      .def("facts", &facts)
      .def("initial", &initial_dict)
      .def("lives", &lives_dict)
      .def("segments", &segments_dict)
      .def("total", &total, nb::arg("name"))
      .def("totals_at", &totals_in, nb::arg("states"))
      .def("reserved_changes", &reserved_changes)
      .def("envelope", &envelope_of, nb::arg("name"), nb::arg("starts"))
      .def("layout_at", &layout_dict, nb::arg("state"));
}
