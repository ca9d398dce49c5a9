// What a replay writes down while it runs: to compare with a recording, or to serve as one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "address_space.h"
#include "allocator_types.h"
#include "trace_ops.h"

namespace fragdoctor {

// Collects what the model asks of the driver, and answers where the file put new memory. Notes also
// where the model would have put it.
class Recorder final : public Observer, public Placement {
 public:
  struct Emitted {
    Action action;
    std::uint64_t address, size;
  };

  Recorder(const std::vector<SegmentRecord>& records, const AddressSpace& space)
      : records_(records), space_(space) {}

  void on_event(const TraceEvent& e) override {
    if (!is_segment_action(e.action)) return;
    emitted_.push_back({e.action, e.address, e.size});
    if (e.action == Action::segment_alloc) {
      const std::uint64_t own = space_.take(SEGMENT_BASE, e.size);
      own_places_[e.address] = own;
      is_lost_ = is_lost_ || own == 0;
    } else if (e.action == Action::segment_free) {
      const auto own = own_places_.find(e.address);
      space_.release(own == own_places_.end() ? e.address : own->second);
      if (own != own_places_.end()) own_places_.erase(own);
    }
  }

  // Where the model would have put the segments, by where they are; those of the start stay.
  const std::unordered_map<std::uint64_t, std::uint64_t>& own_places() const { return own_places_; }
  const AddressSpace& own_space() const { return space_; }
  bool is_lost() const { return is_lost_; }  // there was no place

  std::uint64_t place(std::uint64_t size, bool is_reservation, std::uint32_t, bool) override {
    const Action wanted = is_reservation ? Action::segment_map : Action::segment_alloc;
    if (is_reservation) {
      // Pages that this operation mapped before, in another reservation, are no place for a new one.
      for (std::size_t i = first_ + std::min(emitted_.size(), last_ - first_); i < last_; ++i)
        if (records_[i].action == wanted) return records_[i].address;
    }
    std::size_t n_before = 0;  // of that kind, made by the model so far for this operation
    for (const Emitted& e : emitted_)
      if (e.action == wanted && !is_reservation) ++n_before;
    for (std::size_t i = first_; i < last_; ++i) {
      const SegmentRecord& r = records_[i];
      if (r.action != wanted || (!is_reservation && r.size != size)) continue;
      if (n_before > 0) --n_before;
      else return r.address;
    }
    return 0;
  }

  // The recorded events that belong to the current operation.
  void expect(std::size_t first, std::size_t last) {
    first_ = first;
    last_ = last;
    emitted_.clear();
  }
  std::size_t first() const { return first_; }
  std::size_t last() const { return last_; }
  const std::vector<Emitted>& emitted() const { return emitted_; }

  std::size_t count_equal() const {
    std::size_t equal = 0, at = 0;
    for (std::size_t i = first_; i < last_; ++i) {
      const SegmentRecord& r = records_[i];
      const std::size_t stop = std::min(emitted_.size(), at + MAX_LOOK_AHEAD);
      for (std::size_t j = at; j < stop; ++j) {
        const Emitted& e = emitted_[j];
        if (e.action != r.action || e.address != r.address || e.size != r.size) continue;
        ++equal;
        at = j + 1;
        break;
      }
      if (at >= emitted_.size()) break;
    }
    return equal;
  }

 private:
  static constexpr std::size_t MAX_LOOK_AHEAD = 256;  // keeps crafted files linear

  const std::vector<SegmentRecord>& records_;
  std::vector<Emitted> emitted_;
  AddressSpace space_;
  std::unordered_map<std::uint64_t, std::uint64_t> own_places_;
  bool is_lost_ = false;
  std::size_t first_ = 0, last_ = 0;
};

class TraceWriter final : public Observer {
 public:
  explicit TraceWriter(std::vector<TraceEvent>& events) : events_(events) {}
  void on_event(const TraceEvent& e) override { events_.push_back(e); }

 private:
  std::vector<TraceEvent>& events_;
};

}  // namespace fragdoctor
