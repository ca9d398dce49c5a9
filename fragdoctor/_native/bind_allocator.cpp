// Python interface of the allocator model. Blocks are identified by address here, as in programs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <unordered_map>

#include "allocator.h"

namespace nb = nanobind;
using namespace fragdoctor;

namespace {

constexpr std::uint32_t MAX_STREAMS = 1U << 16;

class Rehearsal {
 public:
  explicit Rehearsal(const Config& config) : core_(config) {}

  std::optional<std::uint64_t> malloc(std::uint64_t size, std::uint32_t stream,
                                      std::uint32_t pool) {
    check_stream(stream);
    check_pool(pool);
    const MallocResult result = core_.malloc(size, stream, pool);
    if (!result.ok) return std::nullopt;
    if (result.block != NO_BLOCK) live_[result.address] = result.block;
    return result.address;
  }

  bool free(std::uint64_t address) {
    const auto it = live_.find(address);
    if (it == live_.end()) return false;
    const BlockId block = it->second;
    live_.erase(it);
    core_.free(block);
    return true;
  }

  bool record_stream(std::uint64_t address, std::uint32_t stream) {
    check_stream(stream);
    const auto it = live_.find(address);
    if (it == live_.end()) return false;
    core_.record_stream(it->second, stream);
    return true;
  }

  void pool_release(std::uint32_t pool, bool flush) {
    check_pool(pool);
    core_.pool_release(pool, flush);
  }

  void context_begin(std::uint32_t pool, bool is_capture) {
    check_pool(pool);
    core_.context_begin(pool, is_capture);
  }

  nb::list layout() const {
    nb::list segments;
    for (const SegmentView& s : core_.layout()) {
      nb::list blocks;
      for (const BlockView& b : s.blocks) {
        blocks.append(nb::make_tuple(b.address, b.size, b.requested, static_cast<int>(b.state)));
      }
      segments.append(
          nb::make_tuple(s.address, s.size, s.is_expandable, s.stream, s.pool, s.is_small, blocks));
    }
    return segments;
  }

  std::optional<std::string> check() const {
    const char* wrong = core_.check();
    return wrong == nullptr ? std::nullopt : std::make_optional<std::string>(wrong);
  }

  Allocator& core() { return core_; }
  const Allocator& core() const { return core_; }

 private:
  static void check_stream(std::uint32_t stream) {
    if (stream >= MAX_STREAMS) throw nb::value_error("stream number too large");
  }
  void check_pool(std::uint32_t pool) const {
    if (!core_.pool_exists(pool)) throw nb::value_error("no such pool");
  }

  Allocator core_;
  std::unordered_map<std::uint64_t, BlockId> live_;
};

void bind_config(nb::module_& m) {
  nb::class_<Config>(m, "AllocatorConfig")
      .def(nb::init<>())
      .def_prop_rw(
          "era", [](const Config& c) { return static_cast<int>(c.era); },
          [](Config& c, int era) {
            if (era < 0 || era > 2) throw nb::value_error("era is 0, 1 or 2");
            c.era = static_cast<Era>(era);
          })
      .def_rw("capacity_bytes", &Config::capacity_bytes)
      .def_rw("device_total_bytes", &Config::device_total_bytes)
      .def_rw("device_total_is_least", &Config::device_total_is_least)
      .def_rw("memory_fraction", &Config::memory_fraction)
      .def_rw("fraction_of_one_counts", &Config::fraction_of_one_counts)
      .def_rw("event_delay", &Config::event_delay)
      .def_prop_rw(
          "max_split_bytes", [](const Config& c) { return c.settings.max_split_bytes; },
          [](Config& c, std::uint64_t v) { c.settings.max_split_bytes = v; })
      .def_prop_rw(
          "max_non_split_rounding_bytes",
          [](const Config& c) { return c.settings.max_non_split_rounding_bytes; },
          [](Config& c, std::uint64_t v) { c.settings.max_non_split_rounding_bytes = v; })
      .def_prop_rw(
          "large_segment_bytes", [](const Config& c) { return c.settings.large_segment_bytes; },
          [](Config& c, std::uint64_t v) {
            if (v < MIN_LARGE_ALLOC) throw nb::value_error("large_segment_bytes too small");
            c.settings.large_segment_bytes = v;
          })
      .def_prop_rw(
          "garbage_collection_threshold",
          [](const Config& c) { return c.settings.garbage_collection_threshold; },
          [](Config& c, double v) { c.settings.garbage_collection_threshold = v; })
      .def_prop_rw(
          "expandable_segments", [](const Config& c) { return c.settings.expandable_segments; },
          [](Config& c, bool v) { c.settings.expandable_segments = v; })
      .def_prop_rw(
          "reservation_bytes", [](const Config& c) { return c.settings.reservation_bytes; },
          [](Config& c, std::uint64_t v) { c.settings.reservation_bytes = v; })
      .def_prop_rw(
          "reservation_fraction", [](const Config& c) { return c.settings.reservation_fraction; },
          [](Config& c, double v) { c.settings.reservation_fraction = v; })
      .def_prop_rw(
          "roundup_power2_divisions",
          [](const Config& c) { return c.settings.roundup_power2_divisions; },
          [](Config& c, const std::array<std::uint32_t, 16>& v) {
            c.settings.roundup_power2_divisions = v;
          });
}

nb::dict counters(const Rehearsal& r) {
  const Counters& c = r.core().counters();
  nb::dict d;
  d["reserved"] = c.reserved;
  d["allocated"] = c.allocated;
  d["active"] = c.active;
  d["requested"] = c.requested;
  d["peak_reserved"] = c.peak_reserved;
  d["peak_allocated"] = c.peak_allocated;
  d["peak_active"] = c.peak_active;
  d["peak_requested"] = c.peak_requested;
  d["retries"] = c.retries;
  d["ooms"] = c.ooms;
  d["n_malloc"] = c.n_malloc;
  d["n_free"] = c.n_free;
  d["n_map"] = c.n_map;
  d["n_unmap"] = c.n_unmap;
  return d;
}

nb::dict last_oom(const Rehearsal& r) {
  const OomFigures f = r.core().last_oom();
  nb::dict d;
  d["requested_bytes"] = f.requested_bytes;
  d["rounded_bytes"] = f.rounded_bytes;
  d["alloc_bytes"] = f.alloc_bytes;
  d["total_bytes"] = f.total_bytes;
  d["free_bytes"] = f.free_bytes;
  d["allocated_bytes"] = f.allocated_bytes;
  d["reserved_bytes"] = f.reserved_bytes;
  d["private_free_bytes"] = f.private_free_bytes;
  d["reserve_bytes"] = f.reserve_bytes;
  d["allowed_bytes"] = f.fraction_is_set ? nb::cast(f.allowed_bytes) : nb::none();
  return d;
}

}  // namespace

void bind_allocator(nb::module_& m) {
  bind_config(m);
  nb::class_<Rehearsal>(m, "AllocatorCore")
      .def(nb::init<const Config&>(), nb::arg("config"))
      .def("malloc", &Rehearsal::malloc, nb::arg("size"), nb::arg("stream") = 0,
           nb::arg("pool") = 0)
      .def("free", &Rehearsal::free, nb::arg("address"))
      .def("record_stream", &Rehearsal::record_stream, nb::arg("address"), nb::arg("stream"))
      .def("empty_cache", [](Rehearsal& r) { r.core().empty_cache(); })
      .def("synchronize", [](Rehearsal& r) { r.core().synchronize(); })
      .def(
          "set_fraction", [](Rehearsal& r, double f) { r.core().set_fraction(f); },
          nb::arg("fraction"))
      .def(
          "set_settings", [](Rehearsal& r, const Config& c) { r.core().set_settings(c.settings); },
          nb::arg("config"))
      .def(
          "pool_create",
          [](Rehearsal& r, bool use_on_oom, bool no_split) {
            return r.core().pool_create(use_on_oom, no_split);
          },
          nb::arg("use_on_oom") = false, nb::arg("no_split") = false)
      .def("pool_release", &Rehearsal::pool_release, nb::arg("pool"), nb::arg("flush") = false)
      .def("context_begin", &Rehearsal::context_begin, nb::arg("pool"),
           nb::arg("is_capture") = false)
      .def("context_end", [](Rehearsal& r) { r.core().context_end(); })
      .def("counters", &counters)
      .def("last_oom", &last_oom)
      .def("layout", &Rehearsal::layout)
      .def("check", &Rehearsal::check)
      .def_prop_ro("reserved_bytes",
                   [](const Rehearsal& r) { return r.core().counters().reserved; })
      .def_prop_ro("allocated_bytes",
                   [](const Rehearsal& r) { return r.core().counters().allocated; })
      .def_prop_ro("active_bytes", [](const Rehearsal& r) { return r.core().counters().active; })
      .def_prop_ro("requested_bytes",
                   [](const Rehearsal& r) { return r.core().counters().requested; })
      .def_prop_ro("alloc_retries", [](const Rehearsal& r) { return r.core().counters().retries; })
      .def_prop_ro("ooms", [](const Rehearsal& r) { return r.core().counters().ooms; })
      .def_prop_ro("driver_calls",
                   [](const Rehearsal& r) { return r.core().counters().driver_calls(); });
}
