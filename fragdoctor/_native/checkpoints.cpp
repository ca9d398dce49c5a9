#include "checkpoints.h"

#include <algorithm>
#include <array>
#include <map>

#include "rounding.h"

namespace fragdoctor {
namespace {

constexpr std::size_t N_PER_REPLAY = 16;
constexpr std::size_t MAX_BYTES = 4 * MIB;

bool is_same(const Op& a, const Op& b) {
  return a.size == b.size && a.id == b.id && a.row == b.row && a.stream == b.stream &&
         a.pool == b.pool && a.kind == b.kind;
}

std::size_t n_common(OpSpan a, OpSpan b) {
  if (a.begin() == b.begin()) return std::min(a.size(), b.size());
  const std::size_t n = std::min(a.size(), b.size());
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + n, b.begin(), is_same).first - a.begin());
}

// The number of operations before the first request that two settings round to different sizes.
std::size_t n_rounded_alike(OpSpan ops, const Settings& one, const Settings& other) {
  const auto differs = [&](const Op& op) {
    return (op.kind == OpKind::malloc || op.kind == OpKind::failed) && op.size < MAX_REQUEST &&
           round_size(one, op.size) != round_size(other, op.size);
  };
  return static_cast<std::size_t>(std::find_if(ops.begin(), ops.end(), differs) - ops.begin());
}

}  // namespace

std::shared_ptr<const Checkpoint> Checkpoints::furthest(OpSpan ops, const Config& config,
                                                        std::size_t most, bool fits) const {
  std::vector<std::shared_ptr<const Checkpoint>> kept;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    kept = kept_;
  }
  if (kept.empty()) return nullptr;
  most = std::min(most, n_common(ops_, ops));
  const Allocator fresh(config);
  std::map<std::array<std::uint32_t, 16>, std::size_t> alike;
  for (auto& checkpoint : kept) {
    const Allocator& allocator = checkpoint->allocator;
    if (checkpoint->n_done > most || (fits && !checkpoint->result.fits) ||
        !allocator.is_same_under(fresh))
      continue;
    const auto& divisions = allocator.settings().roundup_power2_divisions;
    if (divisions != config.settings.roundup_power2_divisions) {
      auto known = alike.find(divisions);
      if (known == alike.end()) {
        const std::size_t n = n_rounded_alike(ops, allocator.settings(), config.settings);
        known = alike.emplace(divisions, n).first;
      }
      if (checkpoint->n_done > known->second) continue;
    }
    return checkpoint;
  }
  return nullptr;
}

bool Checkpoints::takes(OpSpan ops) const {
  if (ops.begin() != ops_.begin() || ops.size() != ops_.size()) return false;
  const std::lock_guard<std::mutex> guard(mutex_);
  return size_bytes_ < MAX_BYTES;
}

std::size_t Checkpoints::next_after(std::size_t n_done) const {
  const std::size_t apart = std::max(ops_.size() / N_PER_REPLAY, min_apart_);
  return (n_done / apart + 1) * apart;
}

void Checkpoints::add(Checkpoint&& checkpoint) {
  const std::size_t bytes = checkpoint.size_bytes();
  auto made = std::make_shared<const Checkpoint>(std::move(checkpoint));
  const std::lock_guard<std::mutex> guard(mutex_);
  size_bytes_ += bytes;
  const auto at = std::find_if(kept_.begin(), kept_.end(),
                               [&](const auto& other) { return other->n_done < made->n_done; });
  kept_.insert(at, std::move(made));
}

void Checkpoints::clear() {
  const std::lock_guard<std::mutex> guard(mutex_);
  kept_.clear();
  size_bytes_ = 0;
}

}  // namespace fragdoctor
