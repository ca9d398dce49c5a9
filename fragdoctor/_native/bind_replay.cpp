// Python's view of the undone trace and the replay. Columns in, numpy arrays out; the GIL is
// released while native code runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <string>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "replay.h"
#include "trace_ops.h"
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

void add_contradictions(nb::dict& d, const UndoneTrace& u) {
  nb::dict contradictions;
  for (std::size_t i = 0; i < u.contradictions.size(); ++i)
    if (u.contradictions[i] > 0) contradictions[CONTRADICTION_NAMES[i]] = u.contradictions[i];
  d["contradictions"] = contradictions;
}

// A trace with everything that follows from it before any choice is made. Keeps the columns.
class NativeTrace {
 public:
  NativeTrace(Column<std::uint8_t> action, Column<std::uint64_t> address,
              Column<std::uint64_t> size, Column<std::int32_t> stream, Column<std::int32_t> pool,
              Column<std::uint64_t> segment_address, Column<std::uint64_t> segment_size,
              Column<std::int32_t> segment_stream, Column<std::int32_t> segment_pool,
              Column<std::uint8_t> segment_kind, Column<std::uint8_t> segment_expandable,
              Column<std::uint64_t> block_address, Column<std::uint64_t> block_size,
              Column<std::uint64_t> block_requested, Column<std::uint8_t> block_state,
              const Config& config)
      : kept_(nb::make_tuple(action, address, size, stream, pool, segment_address, segment_size,
                             segment_stream, segment_pool, segment_kind, segment_expandable,
                             block_address, block_size, block_requested, block_state)),
        settings(config.settings) {
    const std::size_t n = action.shape(0), ns = segment_address.shape(0),
                      nb = block_address.shape(0);
    for (std::size_t k : {address.shape(0), size.shape(0), stream.shape(0), pool.shape(0)})
      check_length(k, n, "events");
    for (std::size_t k : {segment_size.shape(0), segment_stream.shape(0), segment_pool.shape(0),
                          segment_kind.shape(0), segment_expandable.shape(0)})
      check_length(k, ns, "segments");
    for (std::size_t k : {block_size.shape(0), block_requested.shape(0), block_state.shape(0)})
      check_length(k, nb, "blocks");
    trace = {n, action.data(), address.data(), size.data(), stream.data(), pool.data()};
    end = {ns, segment_address.data(), segment_size.data(), segment_stream.data(),
           segment_pool.data(), segment_kind.data(), segment_expandable.data(),
           nb, block_address.data(), block_size.data(), block_requested.data(),
           block_state.data()};
    check_numbers();
    nb::gil_scoped_release release;
    undone = undo_trace(trace, end, settings);
  }

  nb::dict undone_dict() const;

  // One column with a value for every event. The trace is undone again for it: hardly anybody
  // needs them, and kept they would be most of the memory.
  nb::object totals(const std::string& name) const {
    WantedTotals wanted;
    wanted.block_bytes = name == "event_block_bytes";
    wanted.allocated = name == "allocated_bytes";
    wanted.active = name == "active_bytes";
    wanted.reserved = name == "reserved_bytes";
    UndoneTrace again;
    {
      nb::gil_scoped_release release;
      again = undo_trace(trace, end, settings, wanted);
    }
    if (wanted.block_bytes) return array_of(std::move(again.block_bytes));
    if (wanted.allocated) return array_of(std::move(again.allocated));
    if (wanted.active) return array_of(std::move(again.active));
    if (wanted.reserved) return array_of(std::move(again.reserved));
    throw nb::value_error("no such column");
  }

 private:
  // Streams and pools size tables in the model: they must be dense and few.
  void check_numbers() const {
    std::int32_t streams = 0, pools = 0;
    for (std::size_t i = 0; i < trace.n; ++i) {
      streams = std::max(streams, trace.stream[i]);
      pools = std::max(pools, trace.pool[i]);
    }
    for (std::size_t i = 0; i < end.n_segments; ++i) {
      streams = std::max(streams, end.segment_stream[i]);
      pools = std::max(pools, end.segment_pool[i]);
    }
    if (streams >= MAX_STREAMS || pools >= MAX_POOLS ||
        static_cast<std::int64_t>(streams) * pools >= MAX_STREAMS)
      throw nb::value_error("more streams or private pools than any genuine trace has");
  }
  static constexpr std::int32_t MAX_STREAMS = 1 << 16, MAX_POOLS = 1 << 12;

  nb::object kept_;

 public:
  Settings settings;
  TraceView trace;
  FinalState end;
  UndoneTrace undone;
};

nb::dict NativeTrace::undone_dict() const {
  const UndoneTrace& u = undone;
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
  d["reserved_rows"] = array_of(std::vector<std::uint32_t>(u.reserved_steps.rows));
  d["reserved_steps_bytes"] = array_of(std::vector<std::int64_t>(u.reserved_steps.bytes));
  d["peak_active_bytes"] = u.peak_active;
  d["peak_reserved_bytes"] = u.reserved_steps.peak();
  d["initial_allocated_bytes"] = u.initial_allocated;
  d["initial_active_bytes"] = u.initial_active;
  d["initial_reserved_bytes"] = u.initial_reserved;
  d["allocated_error_bytes"] = u.allocated_error;
  d["active_error_bytes"] = u.active_error;
  d["reserved_error_bytes"] = u.reserved_error;
  add_contradictions(d, u);
  return d;
}

// The operations of a trace, as inferred or as edited; immutable, shared between threads.
class NativeOps {
 public:
  NativeOps(std::shared_ptr<NativeTrace> trace, const Inference& inference,
            std::uint64_t device_total_bytes)
      : source(std::move(trace)) {
    nb::gil_scoped_release release;
    const NativeTrace& t = *source;
    made = build_ops(t.trace, t.undone, t.settings, inference);
    auto state = std::make_shared<InitialState>(
        initial_state(t.trace, t.undone, t.settings, device_total_bytes));
    initial = std::move(state);
  }

  // The same start, other operations: the memory of a numpy array of them, which is kept.
  NativeOps(const NativeOps& base, Column<std::uint8_t> table)
      : source(base.source), initial(base.initial), edited(nb::cast(table)) {
    const std::size_t n = table.shape(0) / sizeof(Op);
    if (table.shape(0) % sizeof(Op) != 0 ||
        reinterpret_cast<std::uintptr_t>(table.data()) % alignof(Op) != 0)
      throw nb::value_error("not an aligned table of operations");
    edited_ops = OpSpan(reinterpret_cast<const Op*>(table.data()), n);
    made.n_ids = source->undone.blocks.size();
    made.n_pools = base.made.n_pools;
    made.peak_reserved_bytes = base.made.peak_reserved_bytes;
    for (const Op& op : edited_ops) {
      if (op.kind > OpKind::failed || op.pool > made.n_pools || op.id >= UndoneTrace::NO_ID)
        throw nb::value_error("an operation is out of range");
      made.n_ids = std::max(made.n_ids, static_cast<std::size_t>(op.id) + 1);
    }
    if (made.n_ids > source->undone.blocks.size() + 2 * n + 1)
      throw nb::value_error("allocation ids are not dense");
  }

  // The same with the order of blocks older than the trace as the recorded addresses tell it.
  std::shared_ptr<NativeOps> learned(const Config& config) const {
    auto state = std::make_shared<InitialState>(*initial);
    {
      nb::gil_scoped_release release;
      state->order = learn_seed_order(input(), config, {&made.records, &source->trace, &source->end});
    }
    auto other = std::make_shared<NativeOps>(*this);
    other->initial = std::move(state);
    return other;
  }

  OpSpan ops() const { return edited.is_valid() ? edited_ops : OpSpan(made.ops); }

  nb::dict facts() const {
    nb::dict d;
    d["n_ops"] = ops().size();
    d["n_segment_events"] = made.records.size();
    d["n_inferred_empty_cache"] = made.n_inferred_empty_cache;
    d["n_flushed"] = made.n_flushed;
    d["lowest_need_bytes"] = made.lowest_need_bytes == UNLIMITED
                                 ? nb::none()
                                 : nb::object(nb::int_(made.lowest_need_bytes));
    d["peak_reserved_bytes"] = made.peak_reserved_bytes;
    return d;
  }

  ReplayInput input() const { return {ops(), initial.get(), made.n_ids, made.n_pools}; }

  std::shared_ptr<NativeTrace> source;
  TraceOps made;
  std::shared_ptr<const InitialState> initial;
  nb::object edited;  // owns the operations of an edit; else they are those made
  OpSpan edited_ops;
};

// The operations as bytes, without a copy; `op_fields` says what lies where.
nb::object table_of(nb::handle_t<NativeOps> self) {
  const OpSpan ops = nb::cast<const NativeOps&>(self).ops();
  return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>(
      reinterpret_cast<const std::uint8_t*>(ops.begin()), {ops.size() * sizeof(Op)}, self));
}

// Name, numpy format and offset of what an operation consists of.
nb::list op_fields() {
  static_assert(std::is_standard_layout_v<Op> && std::is_trivially_copyable_v<Op>);
  nb::list fields;
  fields.append(nb::make_tuple("size", "u8", offsetof(Op, size)));
  fields.append(nb::make_tuple("allocation", "u4", offsetof(Op, id)));
  fields.append(nb::make_tuple("row", "u4", offsetof(Op, row)));
  fields.append(nb::make_tuple("stream", "u2", offsetof(Op, stream)));
  fields.append(nb::make_tuple("pool", "u2", offsetof(Op, pool)));
  fields.append(nb::make_tuple("kind", "u1", offsetof(Op, kind)));
  return fields;
}

nb::dict result_dict(const ReplayResult& r) {
  const Counters& c = r.counters;
  nb::dict d;
  d["fits"] = r.fits;
  d["oom_event"] = r.first_oom_row < 0 ? nb::none() : nb::object(nb::int_(r.first_oom_row));
  d["oom_bytes"] = r.fits ? nb::none() : nb::object(nb::int_(r.first_oom_bytes));
  d["peak_reserved_bytes"] = c.peak_reserved;
  d["peak_allocated_bytes"] = c.peak_allocated;
  d["peak_active_bytes"] = c.peak_active;
  d["peak_requested_bytes"] = c.peak_requested;
  d["final_reserved_bytes"] = c.reserved;
  d["retries"] = c.retries;
  d["ooms"] = c.ooms;
  d["driver_calls"] = r.driver_calls;
  d["n_replayed"] = r.n_requests;
  d["n_bad_seeds"] = r.n_bad_seeds;
  d["is_cut_short"] = r.is_cut_short;
  d["same_below_bytes"] =
      r.same_below_bytes == UNLIMITED ? nb::none() : nb::object(nb::int_(r.same_below_bytes));
  return d;
}

// The recording that a run would have left, in the vocabulary of snapshots: events are
// (action, address, size, stream, pool), segments end in their blocks (size, requested, state).
nb::dict recording_dict(const SimulatedRecording& r) {
  static const char* const ACTIONS[] = {"alloc",        "free_requested", "free_completed",
                                        "segment_alloc", "segment_free",  "segment_map",
                                        "segment_unmap", "oom"};
  static const char* const STATES[] = {"inactive", "active_pending_free", "active_allocated"};
  nb::list events, segments;
  for (const TraceEvent& e : r.events)
    events.append(nb::make_tuple(ACTIONS[static_cast<std::size_t>(e.action)], e.address, e.size,
                                 e.stream, e.pool));
  for (const SegmentView& s : r.segments) {
    nb::list blocks;
    for (const BlockView& b : s.blocks)
      blocks.append(
          nb::make_tuple(b.size, b.requested, STATES[static_cast<std::size_t>(b.state)]));
    segments.append(nb::make_tuple(s.address, s.size, s.stream, s.pool, s.is_small,
                                   s.is_expandable, blocks));
  }
  nb::dict d;
  d["events"] = events;
  d["segments"] = segments;
  return d;
}

nb::dict comparison_dict(const Comparison& c) {
  nb::dict d;
  d["n_segment_events"] = c.n_recorded;
  d["n_segment_events_model"] = c.n_emitted;
  d["n_segment_events_equal"] = c.n_equal;
  d["n_requests"] = c.n_requests;
  d["n_same_address"] = c.n_same_address;
  d["n_failed"] = c.n_failed_recorded;
  d["n_failed_equal"] = c.n_failed_agreed;
  d["n_failed_model_only"] = c.n_failed_invented;
  d["n_final_blocks"] = c.n_layout;
  d["n_final_blocks_equal"] = c.n_layout_equal;
  d["first_difference_event"] = c.first_difference_row < 0
                                    ? nb::none()
                                    : nb::object(nb::int_(c.first_difference_row));
  d["unexplained_frees"] = c.unexplained_frees;
  d["early_completions"] = c.early_completions;
  return d;
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.attr("OP_BYTES") = sizeof(Op);
  m.attr("OP_FIELDS") = op_fields();
  nb::class_<NativeTrace>(m, "NativeTrace")
      .def(nb::init<Column<std::uint8_t>, Column<std::uint64_t>, Column<std::uint64_t>,
                    Column<std::int32_t>, Column<std::int32_t>, Column<std::uint64_t>,
                    Column<std::uint64_t>, Column<std::int32_t>, Column<std::int32_t>,
                    Column<std::uint8_t>, Column<std::uint8_t>, Column<std::uint64_t>,
                    Column<std::uint64_t>, Column<std::uint64_t>, Column<std::uint8_t>,
                    const Config&>(),
           nb::arg("action"), nb::arg("address"), nb::arg("size"), nb::arg("stream"),
           nb::arg("pool"), nb::arg("segment_address"), nb::arg("segment_size"),
           nb::arg("segment_stream"), nb::arg("segment_pool"), nb::arg("segment_kind"),
           nb::arg("segment_expandable"), nb::arg("block_address"), nb::arg("block_size"),
           nb::arg("block_requested"), nb::arg("block_state"), nb::arg("config"))
      .def("undone", &NativeTrace::undone_dict)
      .def("totals", &NativeTrace::totals, nb::arg("name"));

  nb::class_<NativeOps>(m, "NativeOps")
      .def(
          "__init__",
          [](NativeOps* self, std::shared_ptr<NativeTrace> trace, std::uint64_t limit_bytes,
             bool is_collecting, std::vector<std::uint32_t> empty_cache_rows,
             std::vector<std::uint32_t> late_rows, std::uint64_t device_total_bytes) {
            std::sort(empty_cache_rows.begin(), empty_cache_rows.end());
            std::sort(late_rows.begin(), late_rows.end());
            new (self) NativeOps(std::move(trace),
                                 {limit_bytes, is_collecting, std::move(empty_cache_rows),
                                  std::move(late_rows)},
                                 device_total_bytes);
          },
          nb::arg("trace"), nb::arg("limit_bytes") = 0, nb::arg("is_collecting") = false,
          nb::arg("empty_cache_rows") = std::vector<std::uint32_t>{},
          nb::arg("late_rows") = std::vector<std::uint32_t>{},
          nb::arg("device_total_bytes") = 0)
      .def(
          "edited",
          [](const NativeOps& self, Column<std::uint8_t> table) {
            return std::make_shared<NativeOps>(self, table);
          },
          nb::arg("table").noconvert())
      .def("learned", &NativeOps::learned, nb::arg("config"))
      .def("table", &table_of)
      .def("facts", &NativeOps::facts)
      .def(
          "replay",
          [](const NativeOps& self, const Config& config, bool stop_at_oom, bool remake_initial) {
            ReplayResult result;
            {
              nb::gil_scoped_release release;
              result = replay(self.input(), config, {stop_at_oom, remake_initial});
            }
            return result_dict(result);
          },
          nb::arg("config"), nb::arg("stop_at_oom") = false, nb::arg("remake_initial") = false)
      .def(
          "record",
          [](const NativeOps& self, const Config& config) {
            SimulatedRecording recording;
            {
              nb::gil_scoped_release release;
              replay_and_record(self.input(), config, recording);
            }
            return recording_dict(recording);
          },
          nb::arg("config"))
      .def(
          "replay_recorded",
          [](const NativeOps& self, const Config& config, std::size_t max_ops) {
            ReplayResult result;
            Comparison comparison;
            {
              nb::gil_scoped_release release;
              result = replay_recorded(
                  self.input(), config,
                  {&self.made.records, &self.source->trace, &self.source->end}, comparison, max_ops);
            }
            return nb::make_tuple(result_dict(result), comparison_dict(comparison));
          },
          nb::arg("config"), nb::arg("max_ops") = std::numeric_limits<std::size_t>::max());
}
