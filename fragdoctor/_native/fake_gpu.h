// GPUs without memory, for rehearsing programs: the allocator model serves the requests, tensors
// get the address that it returns, and nothing is stored there.
//
// The interface is C, to be loaded by ctypes: the program's Python and PyTorch may be any version,
// and storages may die in any thread, with or without Python's lock. PyTorch meets it in three
// places: tensors come in through DLPack, whose deleter gives the block back when the storage dies;
// the table of device guards and the table of CUDA hooks hold functions from here.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define FG_API __declspec(dllexport)
#else
#define FG_API __attribute__((visibility("default")))
#endif

extern "C" {

struct fg_settings {
  std::uint64_t max_split_bytes;  // 2^64 - 1 = unlimited
  std::uint64_t max_non_split_rounding_bytes;
  std::uint64_t large_segment_bytes;
  double garbage_collection_threshold;
  std::uint64_t reservation_bytes;
  double reservation_fraction;
  std::uint32_t roundup_power2_divisions[16];
  std::uint32_t expandable_segments;
};

struct fg_config {
  fg_settings settings;
  std::uint64_t capacity_bytes;      // what the driver has for PyTorch; 2^64 - 1 = unlimited
  std::uint64_t device_total_bytes;  // base of fractions; 0 = the capacity
  double memory_fraction;            // < 0 = not set
  std::uint32_t era;
  std::uint32_t fraction_of_one_counts;
};

// One line of a device's trace. `stack` is the caller's number, -1 on frees.
struct fg_event {
  std::uint64_t address, size, time_us;
  std::uint64_t stream;  // the handle
  std::int32_t stack;
  std::uint32_t pool;
  std::uint32_t action;
};

struct fg_segment {
  std::uint64_t address, size, stream;
  std::uint32_t pool, is_small, is_expandable, n_blocks;
};

struct fg_block {
  std::uint64_t address, size, requested;
  std::uint32_t state;
  std::int32_t stack;  // of the request that made it, -1 = none
};

// ---- devices ------------------------------------------------------------------------------------
FG_API void fg_open(std::int32_t n_devices, const fg_config* config);  // forgets earlier state
FG_API void fg_close();
FG_API std::int32_t fg_device();
FG_API void fg_set_device(std::int32_t device);
FG_API std::int64_t fg_stream(std::int32_t device);  // the current stream's id; 0 = default
FG_API void fg_set_stream(std::int32_t device, std::int64_t stream);
FG_API std::int64_t fg_new_stream(std::int32_t device, std::int32_t priority);
FG_API std::uint64_t fg_stream_handle(std::int64_t stream);

// ---- memory -------------------------------------------------------------------------------------
// A DLManagedTensor for a dense or strided tensor on new memory; null if out of memory.
FG_API void* fg_new_tensor(std::int32_t device, std::uint64_t n_bytes, std::uint32_t code,
                           std::uint32_t bits, std::int32_t n_dims, const std::int64_t* sizes,
                           const std::int64_t* strides, std::int32_t stack);
// A block that is not a tensor: its address, or 0 if out of memory (or for zero bytes).
FG_API std::uint64_t fg_take(std::int32_t device, std::uint64_t n_bytes, std::int32_t stack);
// Takes free memory at an address; 0 if it is not free.
FG_API std::uint64_t fg_take_at(std::uint64_t address, std::uint64_t n_bytes, std::int32_t stack);
FG_API void fg_give(std::uint64_t address);
// Exchange the memory of a storage; 1 = done, 0 = out of memory, -1 = not a storage of ours. The
// storage is identified by its address, or if it has none, by the name that fg_name() gave it.
FG_API std::int32_t fg_resize(std::uint64_t address, std::uint64_t name, std::uint64_t n_bytes,
                              std::int32_t stack, std::uint64_t* new_address);
FG_API void fg_name(void* managed, std::uint64_t name);
FG_API void fg_record_stream(std::uint64_t address, std::int64_t stream);
FG_API void fg_empty_cache();
FG_API void fg_synchronize(std::int32_t device);
FG_API void fg_set_fraction(std::int32_t device, double fraction);
FG_API void fg_set_settings(std::int32_t device, const fg_settings* settings);

// ---- private pools ------------------------------------------------------------------------------
FG_API std::uint32_t fg_pool_create(std::int32_t device, std::int32_t use_on_oom,
                                    std::int32_t no_split);
FG_API void fg_pool_retain(std::int32_t device, std::uint32_t pool);
FG_API void fg_pool_release(std::int32_t device, std::uint32_t pool, std::int32_t flush);
FG_API void fg_context_begin(std::int32_t device, std::uint32_t pool, std::int32_t is_capture);
FG_API void fg_context_end(std::int32_t device);

// ---- what is known ------------------------------------------------------------------------------
enum { FG_N_COUNTERS = 16, FG_N_OOM = 11 };
// reserved, allocated, active, requested, their peaks, retries, ooms, driver calls (malloc, free,
// map, unmap), synchronizations, the driver's free bytes, number of events.
// Four numbers (now, peak, added, removed) for each of FG_N_STATISTICS: nine kinds, each for
// all, the large and the small pool (allocations, segments, active, inactive splits, then their
// bytes: allocated, reserved, active, inactive splits, requested), then oversize allocations and
// segments.
enum { FG_N_STATISTICS = 29 };
FG_API void fg_statistics(std::int32_t device, std::int64_t* values);
FG_API void fg_reset_peaks(std::int32_t device);
FG_API void fg_reset_sums(std::int32_t device);
FG_API void fg_counters(std::int32_t device, std::uint64_t* values);
// requested, rounded, alloc, total, free, allocated, reserved, private free, fraction is set,
// allowed, reservation.
FG_API void fg_last_oom(std::int32_t device, std::uint64_t* values);
FG_API void fg_events(std::int32_t device, std::uint64_t first, std::uint64_t count,
                      fg_event* events);
// A hash of the requested sizes in a range of events, in order.
FG_API std::uint64_t fg_digest(std::int32_t device, std::uint64_t first, std::uint64_t last);
FG_API void fg_layout_size(std::int32_t device, std::uint64_t* n_segments, std::uint64_t* n_blocks);
FG_API void fg_layout(std::int32_t device, fg_segment* segments, fg_block* blocks);

// ---- functions for PyTorch's tables -------------------------------------------------------------
// The address of a function that does for these devices what the method of that name does in
// DeviceGuardImplInterface or CUDAHooksInterface; null if there is none.
FG_API void* fg_guard_method(const char* name);
FG_API void* fg_hook_method(const char* name);
FG_API void fg_set_pinned_allocator(void* allocator);

}  // extern "C"
