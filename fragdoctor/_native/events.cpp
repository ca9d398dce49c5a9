// Blocks used on other streams: their memory is reusable only when those streams are done.
#include <algorithm>
#include <iterator>
#include <utility>

#include "allocator.h"

namespace fragdoctor {
namespace {

// PyTorch keeps the events in a hash table and checks the streams in its order. This is that order,
// except for streams that share a slot: the hash of torch.cuda.Stream() number n of device 0.
std::uint64_t stream_hash(std::uint32_t stream) {
  constexpr std::uint64_t CUDA = 1ULL << 56;
  const std::uint64_t id = stream == 0 ? 0 : (stream - 1ULL) * 32 + 3;
  return fibonacci_hash(CUDA | id);
}

}  // namespace

void Allocator::record_stream(BlockId id, std::uint32_t stream) {
  Block& block = blocks_[id];
  if (stream == block.stream) return;
  std::vector<std::uint32_t>& uses = stream_uses_[id];
  if (std::find(uses.begin(), uses.end(), stream) == uses.end()) uses.push_back(stream);
  block.has_stream_uses = true;
}

// The block was freed: record one event on every stream that uses it.
void Allocator::insert_events(BlockId id) {
  for (const std::uint32_t stream : stream_uses_[id]) {
    ++blocks_[id].event_count;
    events_[stream_hash(stream)].push_back({id, config_.event_delay, sync_epoch_});
  }
  stream_uses_.erase(id);
  blocks_[id].has_stream_uses = false;
}

void Allocator::insert_deferred_events() {
  for (const BlockId id : std::exchange(deferred_, {})) insert_events(id);
}

void Allocator::finish_event(BlockId id) {
  if (--blocks_[id].event_count == 0) free_block(id);
}

// Check the events in order, on each stream up to the first that is not done.
void Allocator::process_events() {
  insert_deferred_events();
  for (auto it = events_.begin(); it != events_.end();) {
    std::deque<Event>& queue = it->second;
    while (!queue.empty()) {
      Event& event = queue.front();
      if (event.queries_left > 0 && event.epoch == sync_epoch_) {
        --event.queries_left;
        break;
      }
      finish_event(event.block);
      queue.pop_front();
    }
    it = queue.empty() ? events_.erase(it) : std::next(it);
  }
}

void Allocator::synchronize_and_free_events() {
  insert_deferred_events();
  ++counters_.sync_all_streams;
  for (const auto& [stream, queue] : std::exchange(events_, {})) {
    for (const Event& event : queue) finish_event(event.block);
  }
  for (; first_open_ticket_ < tickets_.size(); ++first_open_ticket_) {
    complete(first_open_ticket_);
  }
}

// Wait only for what is pending in one private pool, which is being dropped.
void Allocator::synchronize_and_free_events_of(std::uint32_t pool) {
  const auto is_mine = [&](BlockId id) { return pools_[blocks_[id].pool].owner == pool; };
  for (auto it = events_.begin(); it != events_.end();) {
    std::deque<Event> kept;
    for (const Event& event : std::exchange(it->second, {})) {
      if (is_mine(event.block)) {
        finish_event(event.block);
      } else {
        kept.push_back(event);
      }
    }
    it->second = std::move(kept);
    it = it->second.empty() ? events_.erase(it) : std::next(it);
  }
  for (Ticket ticket = first_open_ticket_; ticket < tickets_.size(); ++ticket) {
    if (tickets_[ticket] != NO_BLOCK && is_mine(tickets_[ticket])) complete(ticket);
  }
}

void Allocator::synchronize() { ++sync_epoch_; }

Ticket Allocator::free_pending(BlockId id) {
  account_free(blocks_[id]);
  ++blocks_[id].event_count;
  blocks_[id].allocated = false;
  tickets_.push_back(id);
  return tickets_.size() - 1;
}

bool Allocator::complete(Ticket ticket) {
  if (ticket >= tickets_.size() || tickets_[ticket] == NO_BLOCK) return false;
  finish_event(std::exchange(tickets_[ticket], NO_BLOCK));
  return true;
}

}  // namespace fragdoctor
