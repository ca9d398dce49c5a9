// The words of a snapshot file: the keys and the closed sets of values that its writers use.
#pragma once

#include <cstdint>

#include "words.h"

namespace fragdoctor {

// Tables of words, formatted by hand.
// clang-format off

// Keys that mean something to the reader, in the order of kKeyNames.
enum class Key : uint8_t {
  action, addr, size, stream, frames, time_us, compile_context, user_metadata, pool_id,
  device_free, forward_frames, internal_metadata, category, cpp_frames,
  filename, line, name,
  device, address, total_size, allocated_size, active_size, requested_size, segment_type,
  segment_pool_id, is_expandable, blocks,
  state, history, real_size,
  segments, device_traces, allocator_settings, external_annotations, host_segments, host_traces,
  stage, allocated, active,
  fx,    // any of the five fx_node_* keys of a frame
  none,  // not a key that the reader knows
};
constexpr int kNKeys = static_cast<int>(Key::none);

constexpr const char* kKeyNames[kNKeys] = {
    "action", "addr", "size", "stream", "frames", "time_us", "compile_context", "user_metadata",
    "pool_id", "device_free", "forward_frames", "internal_metadata", "category", "cpp_frames",
    "filename", "line", "name",
    "device", "address", "total_size", "allocated_size", "active_size", "requested_size",
    "segment_type", "segment_pool_id", "is_expandable", "blocks",
    "state", "history", "real_size",
    "segments", "device_traces", "allocator_settings", "external_annotations", "host_segments",
    "host_traces",
    "stage", "allocated", "active",
    "fx_node_op",
};
constexpr const char* kMoreFxNames[] = {"fx_node_name", "fx_node_target", "fx_node_info",
                                        "fx_original_trace"};

// clang-format on

constexpr uint64_t bit(Key key) { return uint64_t{1} << static_cast<int>(key); }

constexpr uint8_t kNoWord = 255;
// The documentation's spelling of active_pending_free; no version inspected writes it.
constexpr const char* kAwaitingFree = "active_awaiting_free";

// The kind of a dict, determined by its keys.
enum class Shape : uint8_t {
  top,
  segment,
  block,
  history,
  event,
  frame,
  annotation,
  host_segment,
  settings,
  other
};
constexpr int kNShapes = static_cast<int>(Shape::other) + 1;
// For messages ("an event") and for the paths of unknown keys ("events.foo").
constexpr const char* kShapeNouns[kNShapes] = {
    "the snapshot", "a segment",     "a block",        "a history entry",        "an event",
    "a frame",      "an annotation", "a host segment", "the allocator settings", "a container"};
constexpr const char* kShapePaths[kNShapes] = {"",
                                               "segments.",
                                               "blocks.",
                                               "blocks.history.",
                                               "events.",
                                               "frames.",
                                               "external_annotations.",
                                               "host_segments.",
                                               "allocator_settings.",
                                               ""};

constexpr uint64_t kKnownKeys[kNShapes] = {
    bit(Key::segments) | bit(Key::device_traces) | bit(Key::allocator_settings) |
        bit(Key::external_annotations) | bit(Key::host_segments) | bit(Key::host_traces),
    bit(Key::device) | bit(Key::address) | bit(Key::total_size) | bit(Key::allocated_size) |
        bit(Key::active_size) | bit(Key::requested_size) | bit(Key::stream) |
        bit(Key::segment_type) | bit(Key::segment_pool_id) | bit(Key::is_expandable) |
        bit(Key::frames) | bit(Key::blocks) | bit(Key::forward_frames),
    bit(Key::size) | bit(Key::requested_size) | bit(Key::address) | bit(Key::state) |
        bit(Key::frames) | bit(Key::history) | bit(Key::forward_frames) | bit(Key::category),
    bit(Key::addr) | bit(Key::real_size) | bit(Key::frames) | bit(Key::cpp_frames),
    bit(Key::action) | bit(Key::addr) | bit(Key::size) | bit(Key::stream) | bit(Key::frames) |
        bit(Key::time_us) | bit(Key::compile_context) | bit(Key::user_metadata) |
        bit(Key::pool_id) | bit(Key::device_free) | bit(Key::forward_frames) |
        bit(Key::internal_metadata) | bit(Key::category) | bit(Key::cpp_frames),
    bit(Key::filename) | bit(Key::line) | bit(Key::name) | bit(Key::fx),
    bit(Key::device) | bit(Key::time_us) | bit(Key::name) | bit(Key::stage),
    ~uint64_t{0},  // not verified against a writer, read defensively
    ~uint64_t{0},  // kept whole
    0,
};

}  // namespace fragdoctor
