// What an undone trace says about its states: totals, and the layout of the device.
#include <algorithm>
#include <limits>
#include <utility>

#include "undone.h"

namespace fragdoctor {
namespace {

std::int64_t chosen(Total which, std::int64_t allocated, std::int64_t active,
                    std::int64_t reserved) {
  return which == Total::allocated ? allocated : which == Total::active ? active : reserved;
}

void place_segments(const UndoneTrace& undone, std::int32_t state, DeviceLayout& out) {
  std::vector<const SegmentLife*> there;
  for (const SegmentLife& s : undone.segments)
    if (s.start < state && state <= s.done) there.push_back(&s);
  std::sort(there.begin(), there.end(),
            [](const SegmentLife* a, const SegmentLife* b) { return a->address < b->address; });
  for (const SegmentLife* s : there) {
    const bool goes_on = s->kind.is_expandable && !out.segment_kind.empty() &&
                         out.segment_kind.back() == s->kind &&
                         out.segment_address.back() + out.segment_bytes.back() == s->address;
    if (goes_on) {
      out.segment_bytes.back() += s->size;
      continue;
    }
    out.segment_address.push_back(s->address);
    out.segment_bytes.push_back(s->size);
    out.segment_kind.push_back(s->kind);
  }
}

}  // namespace

std::vector<std::int64_t> total_column(const TraceView& trace, const UndoneTrace& undone,
                                       Total which) {
  std::vector<std::int64_t> column(trace.n + 1);
  walk_totals(
      trace, undone,
      [&](std::size_t state, std::int64_t allocated, std::int64_t active, std::int64_t reserved) {
        column[state] = chosen(which, allocated, active, reserved);
      });
  return column;
}

std::vector<std::int64_t> totals_at(const TraceView& trace, const UndoneTrace& undone,
                                    const std::int64_t* states, std::size_t n_states) {
  std::vector<std::int64_t> values;
  values.reserve(3 * n_states);
  // States beyond the end equal the last one.
  const auto at = [&](std::size_t i) {
    return std::min(static_cast<std::size_t>(std::max<std::int64_t>(states[i], 0)), trace.n);
  };
  for (std::size_t next = 0; next < n_states;) {
    const std::size_t mark = at(next) / MARK_APART;
    std::size_t end = next, last = 0;
    for (; end < n_states && at(end) / MARK_APART == mark; ++end) last = std::max(last, at(end));
    walk_totals(
        undone, mark, last,
        [&](std::size_t state, std::int64_t allocated, std::int64_t active, std::int64_t reserved) {
          for (; next < end && at(next) <= state; ++next)
            values.insert(values.end(), {allocated, active, reserved});
        });
  }
  return values;
}

Envelope envelope(const TraceView& trace, const UndoneTrace& undone, Total which,
                  const std::int64_t* starts, std::size_t n_starts) {
  Envelope out;
  out.low.assign(n_starts, std::numeric_limits<std::int64_t>::max());
  out.high.assign(n_starts, std::numeric_limits<std::int64_t>::min());
  std::size_t at = 0;
  walk_totals(
      trace, undone,
      [&](std::size_t state, std::int64_t allocated, std::int64_t active, std::int64_t reserved) {
        while (at + 1 < n_starts && starts[at + 1] <= static_cast<std::int64_t>(state)) ++at;
        if (at >= n_starts || static_cast<std::int64_t>(state) < starts[at]) return;
        const std::int64_t value = chosen(which, allocated, active, reserved);
        out.low[at] = std::min(out.low[at], value);
        out.high[at] = std::max(out.high[at], value);
      });
  return out;
}

DeviceLayout layout_at(const TraceView& trace, const FinalState& end, const UndoneTrace& undone,
                       std::int32_t state) {
  DeviceLayout out;
  place_segments(undone, state, out);
  const Lives& lives = undone.lives;
  std::vector<std::pair<std::uint64_t, std::uint32_t>> live;  // address, life
  for (std::uint32_t i = 0; i < lives.size_of_all(); ++i)
    if (lives.is_active_at(i, state)) live.emplace_back(address_of(trace, end, lives, i), i);
  std::sort(live.begin(), live.end());
  std::size_t next = 0;
  for (std::size_t s = 0; s < out.segment_address.size(); ++s) {
    const std::uint64_t segment_end = out.segment_address[s] + out.segment_bytes[s];
    const auto segment = static_cast<std::int32_t>(s);
    std::uint64_t at = out.segment_address[s];
    const auto add_free = [&](std::uint64_t until) {
      if (until <= at) return;
      out.free_address.push_back(at);
      out.free_bytes.push_back(until - at);
      out.free_segment.push_back(segment);
    };
    while (next < live.size() && live[next].first < at) ++next;  // in no segment
    for (; next < live.size() && live[next].first < segment_end; ++next) {
      const auto [address, life] = live[next];
      add_free(address);
      out.live.push_back(life);
      out.live_segment.push_back(segment);
      at = std::max(at, address + lives.size[life]);
    }
    add_free(segment_end);
  }
  return out;
}

}  // namespace fragdoctor
