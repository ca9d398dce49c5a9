#include "future.h"

#include <algorithm>

namespace fragdoctor {
namespace {

constexpr Ticket NO_TICKET = UNLIMITED;
// As in replay.cpp: free blocks visited by flushes, a few seconds' worth.
constexpr std::uint64_t MAX_FLUSH_WORK = 1'000'000'000ULL;

struct Held {
  std::int64_t born;
  BlockId block;
  Ticket ticket;
  std::int32_t age;
};

class Player {
 public:
  Player(Allocator& allocator, const std::vector<BlockId>& blocks,
         const std::vector<Ticket>& tickets, const Future& future, const LookOnLimits& limits)
      : allocator_(allocator), future_(future), limits_(limits), held_(future.n_slots) {
    for (const Holding& h : future.held) {
      const BlockId block = h.id < blocks.size() ? blocks[h.id] : NO_BLOCK;
      const Ticket ticket = h.id < tickets.size() ? tickets[h.id] : NO_TICKET;
      if (block != NO_BLOCK || ticket != NO_TICKET)
        hold(h.slot, {h.born, block, block == NO_BLOCK ? ticket : NO_TICKET, h.age});
    }
  }

  LookOn run() {
    std::uint64_t n_ops = 0, before = 0, n_same = 0;
    const std::size_t period = std::max<std::size_t>(future_.cycle.size(), 1);
    for (;; ++step_) {
      const std::size_t at = static_cast<std::size_t>(step_);
      const std::uint32_t t = step_ == 0 ? 0 : future_.cycle[(at - 1) % period];
      if (!play(t)) return out_;
      n_ops += future_.first[t + 1] - future_.first[t];
      const std::uint64_t n_after = out_.n_done - future_.counts[0];
      if (future_.cycle.empty() || n_after >= limits_.max_steps || n_ops >= limits_.max_ops ||
          flush_work_ > MAX_FLUSH_WORK || at > 20 * (limits_.max_steps + 1))
        break;
      if (step_ == 0 || at % period != 0) continue;
      const std::uint64_t now = layout_hash();
      n_same = now == before ? n_same + 1 : 0;
      before = now;
      if (n_same < 1) continue;
      out_.repeats = true;
      if (limits_.stops_at_repetition) break;
    }
    return out_;
  }

 private:
  void hold(std::uint32_t slot, const Held& held) {
    if (held.age == KEPT) return;
    held_[slot].push_back(held);
    if (held.age < 0) return;
    const std::int64_t last = held.born + held.age;
    if (last < step_) return;  // it has already outlived its time: nothing says when it goes
    const std::size_t at = static_cast<std::size_t>(last - step_);
    while (expiring_.size() <= at) expiring_.emplace_back();
    expiring_[at].push_back(slot);
  }

  void release(const Held& held) {
    if (held.block != NO_BLOCK) allocator_.free(held.block);
    else if (held.ticket != NO_TICKET) allocator_.complete(held.ticket);
  }

  bool play(std::uint32_t t) {
    std::uint64_t peak_reserved = 0, peak_allocated = 0;
    for (std::uint32_t i = future_.first[t]; i < future_.first[t + 1]; ++i) {
      const FutureOp& op = future_.ops[i];
      if (op.kind != OpKind::malloc) {
        apply(op);
        continue;
      }
      if (!request(op, t)) {
        out_.has_failed = true;
        out_.failed_op = i;
        return false;
      }
      const Counters& c = allocator_.counters();
      peak_reserved = std::max(peak_reserved, c.reserved);
      peak_allocated = std::max(peak_allocated, c.allocated);
    }
    expire();
    const Counters& c = allocator_.counters();
    out_.reserved.push_back(c.reserved);
    out_.allocated.push_back(c.allocated);
    out_.peak_reserved.push_back(std::max(peak_reserved, c.reserved));
    out_.peak_allocated.push_back(std::max(peak_allocated, c.allocated));
    out_.n_done += future_.counts[t];
    ++out_.n_played;
    return true;
  }

  bool request(const FutureOp& op, std::uint32_t t) {
    const std::int64_t more = op.growth * (step_ - future_.origin[t]);
    const std::int64_t size = std::max<std::int64_t>(static_cast<std::int64_t>(op.size) + more, 1);
    const std::uint64_t retries = allocator_.counters().retries;
    const MallocResult made =
        allocator_.malloc(static_cast<std::uint64_t>(size), op.stream, op.pool);
    if (allocator_.counters().retries != retries) flush_work_ += held_.size() + 1000;
    if (!made.ok) {
      out_.failed_bytes = static_cast<std::uint64_t>(size);
      return false;
    }
    if (made.block == NO_BLOCK) return true;
    if (op.age == REPLACED) take_all(op.slot);
    hold(op.slot, {step_, made.block, NO_TICKET, op.age});
    return true;
  }

  void take_all(std::uint32_t slot) {
    std::vector<Held>& held = held_[slot];
    for (const Held& h : held)
      if (h.age == REPLACED) release(h);
    held.erase(
        std::remove_if(held.begin(), held.end(), [](const Held& h) { return h.age == REPLACED; }),
        held.end());
  }

  void apply(const FutureOp& op) {
    if (op.kind == OpKind::empty_cache) allocator_.empty_cache();
    if (op.kind != OpKind::free && op.kind != OpKind::free_pending && op.kind != OpKind::complete)
      return;
    std::vector<Held>& held = held_[op.slot];
    for (std::size_t i = 0; i < held.size(); ++i) {
      if (held[i].born != step_ - op.age) continue;
      if (op.kind == OpKind::free_pending && held[i].block != NO_BLOCK) {
        held[i].ticket = allocator_.free_pending(held[i].block);
        held[i].block = NO_BLOCK;
        return;
      }
      release(held[i]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }

  // Frees blocks that have reached the end of their life although no free came.
  void expire() {
    if (expiring_.empty()) return;
    for (const std::uint32_t slot : expiring_.front()) {
      std::vector<Held>& held = held_[slot];
      for (std::size_t i = 0; i < held.size();) {
        if (held[i].age < 0 || held[i].born + held[i].age != step_) {
          ++i;
          continue;
        }
        release(held[i]);
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    expiring_.pop_front();
  }

  std::uint64_t layout_hash() const {
    std::uint64_t hash = 0;
    const auto mix = [&hash](std::uint64_t value) {
      hash = fibonacci_hash(hash ^ value) + (hash >> 29);
    };
    for (const SegmentView& segment : allocator_.layout()) {
      mix(segment.address);
      mix(segment.size);
      for (const BlockView& block : segment.blocks) {
        mix(block.size);
        mix(static_cast<std::uint64_t>(block.state));
      }
    }
    return hash;
  }

  Allocator& allocator_;
  const Future& future_;
  const LookOnLimits& limits_;
  std::vector<std::vector<Held>> held_;              // by slot
  std::deque<std::vector<std::uint32_t>> expiring_;  // slots, by steps from now
  std::int64_t step_ = 0;
  std::uint64_t flush_work_ = 0;
  LookOn out_;
};

}  // namespace

LookOn look_on(Allocator& allocator, const std::vector<BlockId>& blocks,
               const std::vector<Ticket>& tickets, const Future& future,
               const LookOnLimits& limits) {
  return Player(allocator, blocks, tickets, future, limits).run();
}

}  // namespace fragdoctor
