#include "call_tree.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace fragdoctor {
namespace {

class Walker {
 public:
  Walker(const StacksView& stacks, const FramesView& frames, std::int32_t root,
         std::size_t max_depth)
      : stacks_(stacks), frames_(frames), root_(root), max_depth_(max_depth) {
    add_node(NO_NODE, NO_NODE);
    path_begin_.assign(stacks.n, NOT_MADE);
    path_end_.assign(stacks.n, 0);
  }

  CallTree run(const std::int32_t* stack, std::size_t n_events) {
    std::int32_t last = NO_NODE;
    for (std::size_t i = 0; i < n_events; ++i) {
      if (stack[i] < 0 || static_cast<std::size_t>(stack[i]) >= stacks_.n) continue;
      const auto s = static_cast<std::size_t>(stack[i]);
      if (path_begin_[s] == NOT_MADE) make_path(s);
      if (path_begin_[s] == path_end_[s]) continue;
      const std::int32_t place = paths_[path_end_[s] - 1];
      if (place == last) continue;
      visit(static_cast<std::int32_t>(i), s, place);
      last = place;
    }
    return std::move(out_);
  }

 private:
  static constexpr std::size_t NOT_MADE = static_cast<std::size_t>(-1);

  // What is known of the call that a node stands for: its children in the order in which the
  // current iteration of each loop around them met them.
  struct Node {
    std::vector<std::int32_t> met;
    std::size_t position = 0;  // in `met` of the parent, if that has it there
    // The program went back to a line that was not met, or to the line's own code: maybe a loop
    // that turned, to a line which is not always run. It was if a line follows that was met.
    std::int32_t back_visit = NO_NODE, back_target = NO_NODE, back_source = NO_NODE;
    std::vector<std::int32_t> since_back;  // children met from there on
  };

  std::int32_t add_node(std::int32_t parent, std::int32_t frame) {
    out_.parent.push_back(parent);
    out_.frame.push_back(frame);
    nodes_.emplace_back();
    return static_cast<std::int32_t>(out_.parent.size()) - 1;
  }

  std::int32_t child_of(std::int32_t parent, std::int32_t frame) {
    const std::uint64_t key = static_cast<std::uint64_t>(static_cast<std::uint32_t>(parent)) << 32 |
                              static_cast<std::uint32_t>(frame);
    const auto [it, is_new] = children_.try_emplace(key, 0);
    if (is_new) it->second = add_node(parent, frame);
    return it->second;
  }

  // The places that a stack leads through, from below the root on.
  void make_path(std::size_t s) {
    path_begin_[s] = path_end_[s] = paths_.size();
    std::int32_t at = 0;
    std::size_t depth = 0;
    for (std::int64_t i = stacks_.offsets[s + 1]; i-- > stacks_.offsets[s] && depth < max_depth_;) {
      const std::int32_t frame = stacks_.frames[i];
      if (frame < 0 || static_cast<std::size_t>(frame) >= frames_.n) continue;
      const auto kind = static_cast<FrameKind>(frames_.kind[frame]);
      if (kind == FrameKind::skipped) continue;
      if (depth == 0 && frames_.function[frame] != root_) return;
      at = child_of(at, frame);
      paths_.push_back(at);
      ++depth;
      if (kind == FrameKind::closed) break;
    }
    if (depth > 0 && out_.frame[static_cast<std::size_t>(at)] >= 0)
      paths_.push_back(child_of(at, -1));
    path_end_[s] = paths_.size();
  }

  void visit(std::int32_t event, std::size_t s, std::int32_t place) {
    const auto now = static_cast<std::int32_t>(out_.visit_event.size());
    out_.visit_event.push_back(event);
    out_.visit_node.push_back(place);
    const std::size_t begin = path_begin_[s], n = path_end_[s] - begin;
    const std::size_t n_before = before_end_ - before_begin_;
    std::size_t same = 0;
    while (same < n && same < n_before && paths_[begin + same] == paths_[before_begin_ + same])
      ++same;
    std::int32_t at = same == 0 ? 0 : paths_[begin + same - 1];
    for (std::size_t depth = same; depth < n; ++depth) {
      const std::int32_t child = paths_[begin + depth];
      const bool goes_on = depth == same && depth < n_before;
      if (goes_on) move(at, paths_[before_begin_ + depth], child, now);
      else enter(at, child);
      at = child;
    }
    before_begin_ = begin;
    before_end_ = path_end_[s];
  }

  Node& node(std::int32_t id) { return nodes_[static_cast<std::size_t>(id)]; }

  // The function is called: what was met in it before was another call.
  void enter(std::int32_t at, std::int32_t child) {
    Node& here = node(at);
    here.met.clear();
    here.back_visit = NO_NODE;
    meet(at, child);
  }

  void meet(std::int32_t at, std::int32_t child) {
    std::vector<std::int32_t>& met = node(at).met;
    node(child).position = met.size();
    met.push_back(child);
  }

  bool is_met(std::int32_t at, std::int32_t child) {
    const std::vector<std::int32_t>& met = node(at).met;
    const std::size_t position = node(child).position;
    return position < met.size() && met[position] == child;
  }

  // The program goes on within a call, from one line to another.
  void move(std::int32_t at, std::int32_t from, std::int32_t to, std::int32_t now) {
    Node& here = node(at);
    const bool was_met = is_met(at, to), is_idle = here.back_visit == NO_NODE;
    // A line has code of its own before and after each call in it: the last of it may be a turn.
    if (was_met && is_own(to) ? is_idle || is_own(here.back_target)
                              : !was_met && is_idle && is_back(from, to)) {
      here.back_visit = now;
      here.back_target = to;
      here.back_source = from;
      here.since_back.clear();
    }
    if (was_met && !is_own(to)) {
      turn(at, from, to, now);
    } else {
      if (here.back_visit != NO_NODE) here.since_back.push_back(to);
      if (!was_met) meet(at, to);
    }
  }

  void turn(std::int32_t at, std::int32_t from, std::int32_t to, std::int32_t now) {
    Node& here = node(at);
    if (here.back_visit != NO_NODE && (is_own(here.back_target) || !is_back(from, to))) {
      put_turn(here.back_visit, at, here.back_target, here.back_source);
      const std::int32_t first = is_own(here.back_target) ? here.back_target : to;
      here.met.resize(std::min(node(first).position, node(to).position));
      for (const std::int32_t child : here.since_back) meet(at, child);
      meet(at, to);
    } else {
      put_turn(now, at, to, from);
      here.met.resize(node(to).position + 1);
    }
    here.back_visit = NO_NODE;
  }

  void put_turn(std::int32_t visit, std::int32_t at, std::int32_t target, std::int32_t source) {
    out_.turn_visit.push_back(visit);
    out_.turn_node.push_back(at);
    out_.turn_target.push_back(target);
    out_.turn_source.push_back(source);
  }

  // Code of the line itself, without a call: a line may have some before and after each call.
  bool is_own(std::int32_t id) const { return out_.frame[static_cast<std::size_t>(id)] < 0; }

  bool is_back(std::int32_t from, std::int32_t to) const {
    const std::int32_t a = out_.frame[static_cast<std::size_t>(from)],
                       b = out_.frame[static_cast<std::size_t>(to)];
    return a >= 0 && b >= 0 && frames_.function[a] == frames_.function[b] &&
           frames_.line[b] < frames_.line[a];
  }

  const StacksView& stacks_;
  const FramesView& frames_;
  const std::int32_t root_;
  const std::size_t max_depth_;
  CallTree out_;
  std::vector<Node> nodes_;
  // Crafted keys must not line up in one bucket.
  struct Mix {
    std::size_t operator()(std::uint64_t key) const {
      key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9ULL;
      key = (key ^ (key >> 27)) * 0x94d049bb133111ebULL;
      return static_cast<std::size_t>(key ^ (key >> 31));
    }
  };
  std::unordered_map<std::uint64_t, std::int32_t, Mix> children_;
  std::vector<std::int32_t> paths_;  // nodes
  std::vector<std::size_t> path_begin_, path_end_;
  std::size_t before_begin_ = 0, before_end_ = 0;  // the path of the visit before
};

}  // namespace

CallTree call_tree(const std::int32_t* stack, std::size_t n_events, const StacksView& stacks,
                   const FramesView& frames, std::int32_t root, std::size_t max_depth) {
  CallTree tree = Walker(stacks, frames, root, max_depth).run(stack, n_events);
  // A turn may be noticed late: by visit, those that enclose others first.
  std::vector<std::size_t> order(tree.turn_visit.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (tree.turn_visit[a] != tree.turn_visit[b]) return tree.turn_visit[a] < tree.turn_visit[b];
    return a < b;
  });
  CallTree sorted = std::move(tree);
  const auto rearrange = [&](std::vector<std::int32_t>& column) {
    std::vector<std::int32_t> moved(column.size());
    for (std::size_t i = 0; i < order.size(); ++i) moved[i] = column[order[i]];
    column = std::move(moved);
  };
  rearrange(sorted.turn_visit);
  rearrange(sorted.turn_node);
  rearrange(sorted.turn_target);
  rearrange(sorted.turn_source);
  return sorted;
}

}  // namespace fragdoctor
