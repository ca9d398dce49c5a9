// Python's view of the operations of a trace and their replay. The GIL is released while native
// code runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "checkpoints.h"
#include "native_trace.h"
#include "replay.h"
#include "trace_ops.h"

namespace nb = nanobind;
using namespace fragdoctor;

namespace {

constexpr std::int32_t MAX_STREAMS = 1 << 13, MAX_POOLS = 1 << 12;

// Tables in the model are sized by streams and pools, so these must be dense and few.
void check_numbers(const TraceView& trace, const FinalState& end) {
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

// The operations of a trace, as inferred or as edited; immutable, shared between threads.
class NativeOps {
 public:
  NativeOps(std::shared_ptr<NativeTrace> trace, const Inference& inference,
            std::uint64_t device_total_bytes)
      : source(std::move(trace)) {
    const NativeTrace& t = *source;
    check_numbers(t.trace, t.end);
    nb::gil_scoped_release release;
    made = build_ops(t.trace, t.undone, t.settings, inference);
    recorded_ops = std::make_shared<const std::vector<Op>>(std::exchange(made.ops, {}));
    checkpoints = std::make_shared<Checkpoints>(*recorded_ops);
    auto state = std::make_shared<InitialState>(
        initial_state(t.trace, t.undone, t.settings, device_total_bytes));
    initial = std::move(state);
  }

  // The same start with other operations: the memory of a numpy array of them, which is kept alive.
  NativeOps(const NativeOps& base, InColumn<std::uint8_t> table)
      : source(base.source),
        initial(base.initial),
        recorded_ops(base.recorded_ops),
        checkpoints(base.checkpoints),
        edited(nb::cast(table)) {
    const std::size_t n = table.shape(0) / sizeof(Op);
    if (table.shape(0) % sizeof(Op) != 0 ||
        reinterpret_cast<std::uintptr_t>(table.data()) % alignof(Op) != 0)
      throw nb::value_error("not an aligned table of operations");
    edited_ops = OpSpan(reinterpret_cast<const Op*>(table.data()), n);
    made.n_ids = source->undone.lives.n_initial;
    made.n_pools = base.made.n_pools;
    made.peak_reserved_bytes = base.made.peak_reserved_bytes;
    for (const Op& op : edited_ops) {
      if (op.kind > OpKind::failed || op.pool > made.n_pools || op.id >= NO_LIFE)
        throw nb::value_error("an operation is out of range");
      made.n_ids = std::max(made.n_ids, static_cast<std::size_t>(op.id) + 1);
    }
    // If an edit removes most requests, the rest keep their numbers; each may add one.
    if (made.n_ids > std::max(base.made.n_ids, source->undone.lives.n_initial + n) + n + 1)
      throw nb::value_error("allocation ids are not dense");
  }

  // The same, with the order of blocks older than the trace inferred from the recorded addresses.
  std::shared_ptr<NativeOps> learned(const Config& config) const {
    auto state = std::make_shared<InitialState>(*initial);
    {
      nb::gil_scoped_release release;
      state->order =
          learn_seed_order(input(), config, {&made.records, &source->trace, &source->end});
    }
    auto other = std::make_shared<NativeOps>(*this);
    other->initial = std::move(state);
    other->checkpoints = std::make_shared<Checkpoints>(ops());
    return other;
  }

  OpSpan ops() const { return edited.is_valid() ? edited_ops : OpSpan(*recorded_ops); }

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

  ReplayInput input() const {
    return {ops(), initial.get(), made.n_ids, made.n_pools, checkpoints.get()};
  }

  std::shared_ptr<NativeTrace> source;
  TraceOps made;
  std::shared_ptr<const InitialState> initial;
  std::shared_ptr<const std::vector<Op>> recorded_ops;  // also of an edit
  std::shared_ptr<Checkpoints> checkpoints;
  nb::object edited;  // owns the operations of an edit; unset if they are those made
  OpSpan edited_ops;
};

// The operations as bytes, without a copy; `op_fields` describes the layout. A failure that no
// request follows comes last: blocks freed after it were released by its exception.
nb::object table_of(nb::handle_t<NativeOps> self) {
  const OpSpan ops = nb::cast<const NativeOps&>(self).ops();
  std::size_t n = ops.size();
  while (n > 0 && ops[n - 1].kind != OpKind::malloc && ops[n - 1].kind != OpKind::failed) --n;
  if (n == 0 || ops[n - 1].kind != OpKind::failed) n = ops.size();
  return nb::cast(nb::ndarray<nb::numpy, const std::uint8_t, nb::ndim<1>>(
      reinterpret_cast<const std::uint8_t*>(ops.begin()), {n * sizeof(Op)}, self));
}

// Name, numpy format and offset of each field of an operation.
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

// A continuation, checked once; immutable, shared between threads.
class NativeFuture {
 public:
  NativeFuture(InColumn<std::uint8_t> table, std::vector<std::uint32_t> first,
               std::vector<std::int32_t> origin, std::vector<std::uint8_t> counts,
               std::vector<std::uint32_t> cycle, InColumn<std::int32_t> held, std::uint32_t n_slots,
               std::uint32_t n_pools)
      : kept_(nb::cast(table)) {
    const std::size_t n = table.shape(0) / sizeof(FutureOp), n_templates = origin.size();
    if (table.shape(0) % sizeof(FutureOp) != 0 ||
        reinterpret_cast<std::uintptr_t>(table.data()) % alignof(FutureOp) != 0)
      throw nb::value_error("not an aligned table of future operations");
    const auto* ops = reinterpret_cast<const FutureOp*>(table.data());
    if (n_templates == 0 || first.size() != n_templates + 1 || counts.size() != n_templates ||
        !std::is_sorted(first.begin(), first.end()) || first.back() > n || n_slots >= NO_LIFE ||
        held.shape(0) % 4 != 0)
      throw nb::value_error("a future is out of range");
    for (const std::uint32_t t : cycle)
      if (t >= n_templates) throw nb::value_error("a future is out of range");
    constexpr std::int64_t MAX_GROWTH = std::int64_t{1} << 40;
    for (std::size_t i = 0; i < n; ++i) {
      const FutureOp& op = ops[i];
      if (op.kind > OpKind::failed || op.slot >= n_slots || op.pool > n_pools ||
          op.size > MAX_REQUEST || op.growth > MAX_GROWTH || op.growth < -MAX_GROWTH)
        throw nb::value_error("an operation of the future is out of range");
    }
    const std::int32_t* h = held.data();
    for (std::size_t i = 0; i + 3 < held.shape(0); i += 4) {
      if (h[i] < 0 || h[i + 1] < 0 || static_cast<std::uint32_t>(h[i + 1]) >= n_slots ||
          h[i + 2] > 0)
        throw nb::value_error("a block of the past is out of range");
      future.held.push_back({static_cast<std::uint32_t>(h[i]), static_cast<std::uint32_t>(h[i + 1]),
                             h[i + 2], h[i + 3]});
    }
    for (std::uint8_t& count : counts) count = count != 0;
    future.ops = ops;
    future.first = std::move(first);
    future.origin = std::move(origin);
    future.counts = std::move(counts);
    future.cycle = std::move(cycle);
    future.n_slots = n_slots;
  }

  Future future;

 private:
  nb::object kept_;  // owns the operations
};

nb::list future_op_fields() {
  static_assert(std::is_standard_layout_v<FutureOp> && std::is_trivially_copyable_v<FutureOp>);
  nb::list fields;
  fields.append(nb::make_tuple("size", "u8", offsetof(FutureOp, size)));
  fields.append(nb::make_tuple("growth", "i8", offsetof(FutureOp, growth)));
  fields.append(nb::make_tuple("slot", "u4", offsetof(FutureOp, slot)));
  fields.append(nb::make_tuple("age", "i4", offsetof(FutureOp, age)));
  fields.append(nb::make_tuple("stream", "u2", offsetof(FutureOp, stream)));
  fields.append(nb::make_tuple("pool", "u2", offsetof(FutureOp, pool)));
  fields.append(nb::make_tuple("kind", "u1", offsetof(FutureOp, kind)));
  return fields;
}

// A run after its first operations, and how many private pools its operations name.
struct NativeRun {
  PlayedRun played;
  std::uint32_t n_pools;
};

nb::dict look_dict(LookOn&& look) {
  nb::dict d;
  d["has_failed"] = look.has_failed;
  d["repeats"] = look.repeats;
  d["n_done"] = look.n_done;
  d["n_played"] = look.n_played;
  d["failed_bytes"] = look.failed_bytes;
  d["failed_op"] = look.failed_op;
  d["reserved"] = array_of(std::move(look.reserved));
  d["allocated"] = array_of(std::move(look.allocated));
  d["peak_reserved"] = array_of(std::move(look.peak_reserved));
  d["peak_allocated"] = array_of(std::move(look.peak_allocated));
  return d;
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

// The recording that a run would have left, in the terms of snapshots: events are
// (action, address, size, stream, pool), segments end with their blocks (size, requested, state).
nb::dict recording_dict(const SimulatedRecording& r) {
  nb::list events, segments;
  for (const TraceEvent& e : r.events)
    events.append(nb::make_tuple(ACTION_NAMES[static_cast<std::size_t>(e.action)], e.address,
                                 e.size, e.stream, e.pool));
  for (const SegmentView& s : r.segments) {
    nb::list blocks;
    for (const BlockView& b : s.blocks)
      blocks.append(
          nb::make_tuple(b.size, b.requested, STATE_NAMES[static_cast<std::size_t>(b.state)]));
    segments.append(
        nb::make_tuple(s.address, s.size, s.stream, s.pool, s.is_small, s.is_expandable, blocks));
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
  d["first_difference_event"] =
      c.first_difference_row < 0 ? nb::none() : nb::object(nb::int_(c.first_difference_row));
  d["unexplained_frees"] = c.unexplained_frees;
  d["early_completions"] = c.early_completions;
  return d;
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.attr("OP_BYTES") = sizeof(Op);
  m.attr("OP_FIELDS") = op_fields();
  m.attr("FUTURE_OP_BYTES") = sizeof(FutureOp);
  m.attr("FUTURE_OP_FIELDS") = future_op_fields();
  m.attr("KEPT") = KEPT;
  m.attr("REPLACED") = REPLACED;
  nb::class_<NativeFuture>(m, "NativeFuture")
      .def(nb::init<InColumn<std::uint8_t>, std::vector<std::uint32_t>, std::vector<std::int32_t>,
                    std::vector<std::uint8_t>, std::vector<std::uint32_t>, InColumn<std::int32_t>,
                    std::uint32_t, std::uint32_t>(),
           nb::arg("table").noconvert(), nb::arg("first"), nb::arg("origin"), nb::arg("counts"),
           nb::arg("cycle"), nb::arg("held").noconvert(), nb::arg("n_slots"), nb::arg("n_pools"));
  nb::class_<NativeRun>(m, "NativeRun")
      .def_prop_ro("recorded",
                   [](const NativeRun& self) { return result_dict(self.played.recorded); })
      .def(
          "look_on",
          [](const NativeRun& self, const NativeFuture& future, std::uint64_t max_steps,
             std::uint64_t max_ops, bool stops_at_repetition) {
            for (const FutureOp* op = future.future.ops;
                 op != future.future.ops + future.future.first.back(); ++op)
              if (op->pool > self.n_pools) throw nb::value_error("a future of another trace");
            LookOn look;
            {
              nb::gil_scoped_release release;
              look = look_on(self.played, future.future, {max_steps, max_ops, stops_at_repetition});
            }
            return look_dict(std::move(look));
          },
          nb::arg("future"), nb::arg("max_steps") = 100, nb::arg("max_ops") = 1'000'000,
          nb::arg("stops_at_repetition") = true);
  nb::class_<NativeOps>(m, "NativeOps")
      .def(
          "__init__",
          [](NativeOps* self, std::shared_ptr<NativeTrace> trace, std::uint64_t limit_bytes,
             bool is_collecting, std::vector<std::uint32_t> empty_cache_rows,
             std::vector<std::uint32_t> late_rows, std::uint64_t device_total_bytes) {
            std::sort(empty_cache_rows.begin(), empty_cache_rows.end());
            std::sort(late_rows.begin(), late_rows.end());
            new (self) NativeOps(
                std::move(trace),
                {limit_bytes, is_collecting, std::move(empty_cache_rows), std::move(late_rows)},
                device_total_bytes);
          },
          nb::arg("trace"), nb::arg("limit_bytes") = 0, nb::arg("is_collecting") = false,
          nb::arg("empty_cache_rows") = std::vector<std::uint32_t>{},
          nb::arg("late_rows") = std::vector<std::uint32_t>{}, nb::arg("device_total_bytes") = 0)
      .def(
          "edited",
          [](const NativeOps& self, InColumn<std::uint8_t> table) {
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
          "play",
          [](const NativeOps& self, const Config& config, std::size_t n_past,
             bool remake_initial) {
            nb::gil_scoped_release release;
            return NativeRun{play(self.input(), config, remake_initial, n_past),
                             self.made.n_pools};
          },
          nb::arg("config"), nb::arg("n_past"), nb::arg("remake_initial") = false)
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
              result = replay_recorded(self.input(), config,
                                       {&self.made.records, &self.source->trace, &self.source->end},
                                       comparison, max_ops);
            }
            return nb::make_tuple(result_dict(result), comparison_dict(comparison));
          },
          nb::arg("config"), nb::arg("max_ops") = std::numeric_limits<std::size_t>::max());
}
