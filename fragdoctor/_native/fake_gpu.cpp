// GPUs without memory: see fake_gpu.h.
#include "fake_gpu.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator.h"

namespace fragdoctor {
namespace {

// ---- DLPack, version 0: the layout is fixed ----------------------------------------------------

struct DLTensor {
  void* data;
  std::int32_t device_type, device_id;
  std::int32_t n_dims;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  std::int64_t* sizes;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* context;
  void (*deleter)(DLManagedTensor*);
};

constexpr std::int32_t DL_CUDA = 2;

// ---- devices -----------------------------------------------------------------------------------

constexpr int MAX_DEVICES = 64;
constexpr std::uint64_t DEVICE_SHIFT = 40;  // each device has a window of 1 TiB
constexpr std::uint64_t WINDOW_MASK = (1ULL << 44) - (1ULL << DEVICE_SHIFT);
// PyTorch keeps 32 streams per device and priority and hands them out in turn. An ID is the
// stream's place in its pool, with the pool in the low five bits.
constexpr std::int64_t POOL_STREAMS = 32;
constexpr std::int64_t DEFAULT_POOL = 3, HIGH_POOL = 5;
constexpr std::uint64_t HANDLE_BASE = 0x5e0000000000;

std::uint32_t dense_stream(std::int64_t id) {
  if (id == 0) return 0;
  const auto place = static_cast<std::uint32_t>(id >> 5);
  const bool high = (id & 31) != DEFAULT_POOL;
  return 1 + place + (high ? static_cast<std::uint32_t>(POOL_STREAMS) : 0);
}

std::uint64_t handle_of(std::uint32_t dense) { return dense == 0 ? 0 : HANDLE_BASE + dense; }

std::uint64_t now_us() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(now).count());
}

// One value of torch.cuda.memory_stats().
struct Statistic {
  std::int64_t now = 0, peak = 0, added = 0, taken = 0;

  void change(std::int64_t by) {
    now += by;
    peak = std::max(peak, now);
    (by > 0 ? added : taken) += by > 0 ? by : -by;
  }
};

enum Kind : std::size_t {
  ALLOCATIONS,
  SEGMENTS,
  ACTIVE,
  SPLITS,
  ALLOCATED,
  RESERVED,
  ACTIVE_BYTES,
  SPLIT_BYTES,
  REQUESTED,
  N_KINDS
};
constexpr std::size_t N_POOLS = 3;  // all, large, small

class Gpu final : public Observer {
 public:
  Gpu(const Config& config, int index)
      : allocator_(config), offset_(static_cast<std::uint64_t>(index) << DEVICE_SHIFT) {
    allocator_.set_observer(this);
  }

  void on_event(const TraceEvent& e) override {
    const bool is_oom = e.action == Action::oom;
    const bool is_free = e.action == Action::free_requested || e.action == Action::free_completed;
    events_.push_back({is_oom ? e.address : e.address + offset_, e.size, now_us(),
                       handle_of(e.stream), is_free ? -1 : stack_, e.pool,
                       static_cast<std::uint32_t>(e.action)});
    count(e);
  }

  void on_split(bool is_small, std::int64_t n_blocks, std::int64_t bytes) override {
    change(SPLITS, is_small, n_blocks);
    change(SPLIT_BYTES, is_small, bytes);
  }

  MallocResult take(std::uint64_t n_bytes, std::uint32_t stream, std::int32_t stack) {
    stack_ = stack;
    return handed_out(allocator_.malloc(n_bytes, stream));
  }

  MallocResult take_at(std::uint64_t address, std::uint64_t n_bytes, std::int32_t stack) {
    stack_ = stack;
    return handed_out(allocator_.malloc_at(address - offset_, n_bytes));
  }

  void give(std::uint64_t address) {
    const auto it = live_.find(address);
    if (it == live_.end()) return;
    const BlockId block = it->second.block;
    live_.erase(it);
    allocator_.free(block);
  }

  void record_stream(std::uint64_t address, std::uint32_t stream) {
    const auto it = live_.find(address);
    if (it != live_.end()) allocator_.record_stream(it->second.block, stream);
  }

  std::int64_t new_stream(bool high) {
    std::int64_t& next = high ? next_high_ : next_stream_;
    const std::int64_t id = (next << 5) | (high ? HIGH_POOL : DEFAULT_POOL);
    next = (next + 1) % POOL_STREAMS;
    return id;
  }

  std::int32_t stack_at(std::uint64_t address) const {
    const auto it = live_.find(address);
    return it == live_.end() ? -1 : it->second.stack;
  }

  std::vector<Statistic>& statistics() { return statistics_; }

  Allocator& allocator() { return allocator_; }
  const std::vector<fg_event>& events() const { return events_; }
  std::uint64_t offset() const { return offset_; }

 private:
  MallocResult handed_out(MallocResult result) {
    if (result.ok && result.block != NO_BLOCK) {
      result.address += offset_;
      live_[result.address] = {result.block, stack_};
    }
    return result;
  }

  struct Live {
    BlockId block;
    std::int32_t stack;
  };

  void change(Kind kind, bool is_small, std::int64_t by) {
    if (by == 0) return;
    statistics_[kind * N_POOLS].change(by);
    statistics_[kind * N_POOLS + (is_small ? 2 : 1)].change(by);
  }

  void count(const TraceEvent& e) {
    const auto size = static_cast<std::int64_t>(e.size);
    const auto block = static_cast<std::int64_t>(e.block_bytes);
    const bool is_oversize = e.block_bytes >= allocator_.settings().max_split_bytes;
    switch (e.action) {
      case Action::alloc:
        change(ALLOCATIONS, e.is_small, 1);
        change(ALLOCATED, e.is_small, block);
        change(ACTIVE, e.is_small, 1);
        change(ACTIVE_BYTES, e.is_small, block);
        change(REQUESTED, e.is_small, size);
        if (is_oversize) statistics_[N_KINDS * N_POOLS].change(1);
        break;
      case Action::free_requested:
        change(ALLOCATIONS, e.is_small, -1);
        change(ALLOCATED, e.is_small, -block);
        if (is_oversize) statistics_[N_KINDS * N_POOLS].change(-1);
        break;
      case Action::free_completed:
        change(ACTIVE, e.is_small, -1);
        change(ACTIVE_BYTES, e.is_small, -block);
        change(REQUESTED, e.is_small, -size);
        break;
      case Action::segment_alloc:
        change(SEGMENTS, e.is_small, 1);
        if (is_oversize) statistics_[N_KINDS * N_POOLS + 1].change(1);
        [[fallthrough]];
      case Action::segment_map: change(RESERVED, e.is_small, size); break;
      case Action::segment_free:
        change(SEGMENTS, e.is_small, -1);
        if (is_oversize) statistics_[N_KINDS * N_POOLS + 1].change(-1);
        [[fallthrough]];
      case Action::segment_unmap: change(RESERVED, e.is_small, -size); break;
      default: break;
    }
  }

  Allocator allocator_;
  std::uint64_t offset_;
  std::vector<Statistic> statistics_ = std::vector<Statistic>(FG_N_STATISTICS);
  std::vector<fg_event> events_;
  std::unordered_map<std::uint64_t, Live> live_;
  std::int32_t stack_ = -1;
  std::int64_t next_stream_ = 0, next_high_ = 0;
};

// A storage's memory. PyTorch keeps the DLManagedTensor until the storage dies.
struct Held {
  DLManagedTensor managed{};
  std::uint64_t generation = 0;  // of fg_open(): older ones own nothing anymore
  int device = 0;
  std::uint64_t address = 0;
  std::uint64_t name = 0;
  std::vector<std::int64_t> dims;
};

struct World {
  std::mutex mutex;
  std::vector<std::unique_ptr<Gpu>> gpus;
  std::uint64_t generation = 0;
  std::unordered_map<std::uint64_t, Held*> by_address;
  std::unordered_map<std::uint64_t, Held*> by_name;
  void* pinned_allocator = nullptr;
};

World& world() {
  static World* const it = new World;  // outlives the storages, which may die after main()
  return *it;
}

thread_local std::int32_t current_device = 0;
thread_local std::array<std::int64_t, MAX_DEVICES> current_streams{};

using Lock = std::lock_guard<std::mutex>;

Gpu* gpu_at(std::int32_t device) {
  World& w = world();
  if (device < 0) device = current_device;
  const auto index = static_cast<std::size_t>(device);
  return index < w.gpus.size() ? w.gpus[index].get() : nullptr;
}

Gpu* gpu_of(std::uint64_t address) {
  return gpu_at(static_cast<std::int32_t>((address & WINDOW_MASK) >> DEVICE_SHIFT));
}

std::uint32_t current_dense_stream(std::int32_t device) {
  return dense_stream(current_streams[static_cast<std::size_t>(device)]);
}

Settings settings_of(const fg_settings& given) {
  Settings s;
  s.max_split_bytes = given.max_split_bytes;
  s.max_non_split_rounding_bytes = given.max_non_split_rounding_bytes;
  s.large_segment_bytes = given.large_segment_bytes;
  s.garbage_collection_threshold = given.garbage_collection_threshold;
  s.expandable_segments = given.expandable_segments != 0;
  s.reservation_bytes = given.reservation_bytes;
  s.reservation_fraction = given.reservation_fraction;
  std::copy_n(given.roundup_power2_divisions, s.roundup_power2_divisions.size(),
              s.roundup_power2_divisions.begin());
  return s;
}

void forget(World& w, const Held& held) {
  if (held.address != 0) w.by_address.erase(held.address);
  if (held.name != 0) w.by_name.erase(held.name);
}

void release(DLManagedTensor* managed) {
  auto* held = static_cast<Held*>(managed->context);
  World& w = world();
  {
    const Lock lock(w.mutex);
    if (held->generation == w.generation) {
      forget(w, *held);
      if (held->address != 0) w.gpus[static_cast<std::size_t>(held->device)]->give(held->address);
    }
  }
  delete held;
}

// ---- what PyTorch's tables call: methods, so the object comes first ----------------------------

struct Device {
  std::int8_t type, index;
};

struct Stream {
  Device device;
  std::int64_t id;
};

constexpr std::int8_t CUDA = 1;

Device device_now() { return {CUDA, static_cast<std::int8_t>(current_device)}; }

Stream stream_of(Device d) {
  const std::int8_t index = d.index < 0 ? static_cast<std::int8_t>(current_device) : d.index;
  return {{CUDA, index}, current_streams[static_cast<std::size_t>(index)]};
}

Device guard_exchange_device(const void*, Device d) {
  const Device before = device_now();
  if (d.index >= 0) current_device = d.index;
  return before;
}
Device guard_get_device(const void*) { return device_now(); }
void guard_set_device(const void*, Device d) {
  if (d.index >= 0) current_device = d.index;
}
std::int8_t guard_type(const void*) { return CUDA; }
Stream guard_get_stream(const void*, Device d) { return stream_of(d); }
Stream guard_default_stream(const void*, Device d) { return {stream_of(d).device, 0}; }
Stream guard_pool_stream(const void*, Device d, bool high) {
  const Device device = stream_of(d).device;
  return {device, fg_new_stream(device.index, high ? -1 : 0)};
}
Stream guard_new_stream(const void*, Device d, int priority) {
  const Device device = stream_of(d).device;
  return {device, fg_new_stream(device.index, priority)};
}
Stream guard_exchange_stream(const void*, Stream s) {
  const Stream before = stream_of(s.device);
  current_streams[static_cast<std::size_t>(before.device.index)] = s.id;
  return before;
}
void* guard_stream_handle(const void*, Stream s) {
  return reinterpret_cast<void*>(fg_stream_handle(s.id));
}
void guard_destroy_event(const void*, void*, std::int8_t) {}
void guard_record(const void*, void** event, const Stream&, std::int8_t, int) {
  *event = &world();  // any event will do: everything is done at once
}
void guard_block(const void*, void*, const Stream&) {}
bool guard_query_event(const void*, void*) { return true; }
std::int8_t guard_device_count(const void*) {
  return static_cast<std::int8_t>(world().gpus.size());
}
bool guard_query_stream(const void*, const Stream&) { return true; }
void guard_synchronize_stream(const void*, const Stream&) {}
bool guard_is_capturing(const void*, const Stream&) { return false; }
void guard_synchronize_event(const void*, void*) {}
void guard_synchronize_device(const void*, std::int8_t) {}
// The first word of a c10::DataPtr is the address.
void guard_record_data_ptr(const void*, void* const& data, const Stream& s) {
  fg_record_stream(reinterpret_cast<std::uint64_t>(data), s.id);
}
double guard_elapsed_time(const void*, void*, void*, std::int8_t) { return 1.0; }

bool answer_true(const void*) { return true; }
bool answer_false(const void*) { return false; }
bool hook_has_context(const void*, std::int8_t) { return true; }
void hook_init(const void*) {}
std::int8_t hook_device_count(const void*) { return guard_device_count(nullptr); }
int hook_n_gpus(const void*) { return guard_device_count(nullptr); }
std::int8_t hook_current_device(const void*) { return static_cast<std::int8_t>(current_device); }
void hook_set_current_device(const void*, std::int8_t d) { current_device = d; }
std::int8_t hook_exchange_device(const void*, std::int8_t d) {
  const auto before = static_cast<std::int8_t>(current_device);
  if (d >= 0) current_device = d;
  return before;
}
// C++ asks about memory that it has just pinned; host.py answers for memory pinned by Python.
bool hook_is_pinned(const void*, const void*) { return true; }
void* hook_pinned_allocator(const void*) { return world().pinned_allocator; }
Device hook_device_from_ptr(const void*, void* data) {
  const auto address = reinterpret_cast<std::uint64_t>(data);
  return {CUDA, static_cast<std::int8_t>((address & WINDOW_MASK) >> DEVICE_SHIFT)};
}
long hook_cudnn_version(const void*) { return 91900; }
long hook_cudart_version(const void*) { return 13000; }
double hook_min_epsilon(const void*) { return 1e-5; }
void hook_device_synchronize(const void*, std::int8_t) {}

struct Method {
  std::string_view name;
  void* function;
};

template <typename F>
Method method(std::string_view name, F* function) {
  return {name, reinterpret_cast<void*>(function)};
}

void* find(const std::vector<Method>& methods, std::string_view name) {
  const auto it =
      std::find_if(methods.begin(), methods.end(), [&](const Method& m) { return m.name == name; });
  return it == methods.end() ? nullptr : it->function;
}

const std::vector<Method>& guard_methods() {
  static const std::vector<Method> methods = {
      method("type", guard_type),
      method("exchangeDevice", guard_exchange_device),
      method("getDevice", guard_get_device),
      method("setDevice", guard_set_device),
      method("uncheckedSetDevice", guard_set_device),
      method("getStream", guard_get_stream),
      method("getDefaultStream", guard_default_stream),
      method("getStreamFromGlobalPool", guard_pool_stream),
      method("getNewStream", guard_new_stream),
      method("exchangeStream", guard_exchange_stream),
      method("getStreamNativeHandle", guard_stream_handle),
      method("destroyEvent", guard_destroy_event),
      method("record", guard_record),
      method("block", guard_block),
      method("queryEvent", guard_query_event),
      method("deviceCount", guard_device_count),
      method("queryStream", guard_query_stream),
      method("synchronizeStream", guard_synchronize_stream),
      method("isStreamCapturing", guard_is_capturing),
      method("synchronizeEvent", guard_synchronize_event),
      method("synchronizeDevice", guard_synchronize_device),
      method("recordDataPtrOnStream", guard_record_data_ptr),
      method("elapsedTime", guard_elapsed_time),
  };
  return methods;
}

const std::vector<Method>& hook_methods() {
  static const std::vector<Method> methods = {
      method("init", hook_init),
      method("isBuilt", answer_true),
      method("isAvailable", answer_true),
      method("hasPrimaryContext", hook_has_context),
      method("deviceCount", hook_device_count),
      method("setCurrentDevice", hook_set_current_device),
      method("getCurrentDevice", hook_current_device),
      method("exchangeDevice", hook_exchange_device),
      method("maybeExchangeDevice", hook_exchange_device),
      method("isPinnedPtr", hook_is_pinned),
      method("getPinnedMemoryAllocator", hook_pinned_allocator),
      method("getDeviceFromPtr", hook_device_from_ptr),
      method("hasCUDA", answer_true),
      method("hasCUDART", answer_true),
      method("hasCuDNN", answer_true),
      method("hasCuSOLVER", answer_true),
      method("hasCuBLASLt", answer_true),
      method("hasMAGMA", answer_false),
      method("hasROCM", answer_false),
      method("current_device", hook_current_device),
      method("compiledWithCuDNN", answer_true),
      method("compiledWithMIOpen", answer_false),
      method("supportsDilatedConvolutionWithCuDNN", answer_true),
      method("supportsDepthwiseConvolutionWithCuDNN", answer_true),
      method("supportsBFloat16ConvolutionWithCuDNNv8", answer_true),
      method("supportsBFloat16RNNWithCuDNN", answer_true),
      method("versionCuDNN", hook_cudnn_version),
      method("versionRuntimeCuDNN", hook_cudnn_version),
      method("versionCUDART", hook_cudart_version),
      method("batchnormMinEpsilonCuDNN", hook_min_epsilon),
      method("getNumGPUs", hook_n_gpus),
      method("deviceSynchronize", hook_device_synchronize),
  };
  return methods;
}

}  // namespace
}  // namespace fragdoctor

using namespace fragdoctor;

extern "C" {

void fg_open(std::int32_t n_devices, const fg_config* given) {
  Config config;
  config.settings = settings_of(given->settings);
  config.era = static_cast<Era>(given->era);
  config.capacity_bytes = given->capacity_bytes;
  config.device_total_bytes = given->device_total_bytes;
  config.memory_fraction = given->memory_fraction;
  config.fraction_of_one_counts = given->fraction_of_one_counts != 0;
  World& w = world();
  const Lock lock(w.mutex);
  ++w.generation;
  w.by_address.clear();
  w.by_name.clear();
  w.gpus.clear();
  const int n = std::clamp(static_cast<int>(n_devices), 0, MAX_DEVICES);
  for (int i = 0; i < n; ++i) w.gpus.push_back(std::make_unique<Gpu>(config, i));
  current_device = 0;
  current_streams = {};
}

void fg_close() {
  World& w = world();
  const Lock lock(w.mutex);
  ++w.generation;
  w.by_address.clear();
  w.by_name.clear();
  w.gpus.clear();
}

std::int32_t fg_device() { return current_device; }

void fg_set_device(std::int32_t device) {
  if (device >= 0 && device < MAX_DEVICES) current_device = device;
}

std::int64_t fg_stream(std::int32_t device) {
  return current_streams[static_cast<std::size_t>(device < 0 ? current_device : device)];
}

void fg_set_stream(std::int32_t device, std::int64_t stream) {
  current_streams[static_cast<std::size_t>(device < 0 ? current_device : device)] = stream;
}

std::int64_t fg_new_stream(std::int32_t device, std::int32_t priority) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  return gpu == nullptr ? 0 : gpu->new_stream(priority < 0);
}

std::uint64_t fg_stream_handle(std::int64_t stream) { return handle_of(dense_stream(stream)); }

void* fg_new_tensor(std::int32_t device, std::uint64_t n_bytes, std::uint32_t code,
                    std::uint32_t bits, std::int32_t n_dims, const std::int64_t* sizes,
                    const std::int64_t* strides, std::int32_t stack) {
  World& w = world();
  const Lock lock(w.mutex);
  const std::int32_t index = device < 0 ? current_device : device;
  Gpu* gpu = gpu_at(index);
  if (gpu == nullptr) return nullptr;
  const MallocResult block = gpu->take(n_bytes, current_dense_stream(index), stack);
  if (!block.ok) return nullptr;
  auto held = std::make_unique<Held>();
  const auto n = static_cast<std::size_t>(n_dims);
  held->dims.resize(2 * n);
  std::copy_n(sizes, n, held->dims.begin());
  std::copy_n(strides, n, held->dims.begin() + n_dims);
  held->generation = w.generation;
  held->device = index;
  held->address = block.address;
  DLTensor& t = held->managed.tensor;
  t.data = reinterpret_cast<void*>(block.address);
  t.device_type = DL_CUDA;
  t.device_id = index;
  t.n_dims = n_dims;
  t.code = static_cast<std::uint8_t>(code);
  t.bits = static_cast<std::uint8_t>(bits);
  t.lanes = 1;
  t.sizes = held->dims.data();
  t.strides = held->dims.data() + n;
  held->managed.context = held.get();
  held->managed.deleter = release;
  if (held->address != 0) w.by_address[held->address] = held.get();
  return &held.release()->managed;
}

std::uint64_t fg_take(std::int32_t device, std::uint64_t n_bytes, std::int32_t stack) {
  const Lock lock(world().mutex);
  const std::int32_t index = device < 0 ? current_device : device;
  Gpu* gpu = gpu_at(index);
  if (gpu == nullptr) return 0;
  const MallocResult block = gpu->take(n_bytes, current_dense_stream(index), stack);
  return block.ok ? block.address : 0;
}

std::uint64_t fg_take_at(std::uint64_t address, std::uint64_t n_bytes, std::int32_t stack) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_of(address);
  if (gpu == nullptr) return 0;
  const MallocResult block = gpu->take_at(address, n_bytes, stack);
  return block.ok ? block.address : 0;
}

void fg_give(std::uint64_t address) {
  const Lock lock(world().mutex);
  if (Gpu* gpu = gpu_of(address)) gpu->give(address);
}

std::int32_t fg_resize(std::uint64_t address, std::uint64_t name, std::uint64_t n_bytes,
                       std::int32_t stack, std::uint64_t* new_address) {
  World& w = world();
  const Lock lock(w.mutex);
  const auto& table = address != 0 ? w.by_address : w.by_name;
  const auto it = table.find(address != 0 ? address : name);
  if (it == table.end()) return -1;
  Held& held = *it->second;
  Gpu& gpu = *w.gpus[static_cast<std::size_t>(held.device)];
  // The new memory comes first, as in PyTorch: for a moment, old and new exist together.
  const MallocResult block = gpu.take(n_bytes, current_dense_stream(held.device), stack);
  if (!block.ok) return 0;
  forget(w, held);
  if (held.address != 0) gpu.give(held.address);
  held.address = block.address;
  held.name = name;
  if (held.address != 0) w.by_address[held.address] = &held;
  if (name != 0) w.by_name[name] = &held;
  *new_address = held.address;
  return 1;
}

void fg_name(void* managed, std::uint64_t name) {
  World& w = world();
  const Lock lock(w.mutex);
  auto* held = static_cast<Held*>(static_cast<DLManagedTensor*>(managed)->context);
  held->name = name;
  w.by_name[name] = held;
}

void fg_record_stream(std::uint64_t address, std::int64_t stream) {
  const Lock lock(world().mutex);
  if (Gpu* gpu = gpu_of(address)) gpu->record_stream(address, dense_stream(stream));
}

void fg_empty_cache() {
  const Lock lock(world().mutex);
  for (const auto& gpu : world().gpus) gpu->allocator().empty_cache();
}

void fg_synchronize(std::int32_t device) {
  const Lock lock(world().mutex);
  if (Gpu* gpu = gpu_at(device)) gpu->allocator().synchronize();
}

void fg_set_fraction(std::int32_t device, double fraction) {
  const Lock lock(world().mutex);
  if (Gpu* gpu = gpu_at(device)) gpu->allocator().set_fraction(fraction);
}

void fg_set_settings(std::int32_t device, const fg_settings* settings) {
  const Lock lock(world().mutex);
  if (Gpu* gpu = gpu_at(device)) gpu->allocator().set_settings(settings_of(*settings));
}

std::uint32_t fg_pool_create(std::int32_t device, std::int32_t use_on_oom, std::int32_t no_split) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  return gpu == nullptr ? 0 : gpu->allocator().pool_create(use_on_oom != 0, no_split != 0);
}

void fg_pool_retain(std::int32_t device, std::uint32_t pool) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu != nullptr && gpu->allocator().pool_exists(pool)) gpu->allocator().pool_retain(pool);
}

void fg_pool_release(std::int32_t device, std::uint32_t pool, std::int32_t flush) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu != nullptr && gpu->allocator().pool_exists(pool)) {
    gpu->allocator().pool_release(pool, flush != 0);
  }
}

void fg_context_begin(std::int32_t device, std::uint32_t pool, std::int32_t is_capture) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu != nullptr && gpu->allocator().pool_exists(pool)) {
    gpu->allocator().context_begin(pool, is_capture != 0);
  }
}

void fg_context_end(std::int32_t device) {
  const Lock lock(world().mutex);
  if (Gpu* gpu = gpu_at(device)) gpu->allocator().context_end();
}

void fg_statistics(std::int32_t device, std::int64_t* values) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  std::fill_n(values, 4 * FG_N_STATISTICS, 0);
  if (gpu == nullptr) return;
  for (const Statistic& s : gpu->statistics()) {
    *values++ = s.now;
    *values++ = s.peak;
    *values++ = s.added;
    *values++ = s.taken;
  }
}

void fg_reset_peaks(std::int32_t device) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu == nullptr) return;
  for (Statistic& s : gpu->statistics()) s.peak = s.now;
}

void fg_reset_sums(std::int32_t device) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu == nullptr) return;
  for (Statistic& s : gpu->statistics()) s.added = s.taken = 0;
}

std::uint64_t fg_digest(std::int32_t device, std::uint64_t first, std::uint64_t last) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu == nullptr) return 0;
  const std::vector<fg_event>& events = gpu->events();
  std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a, a word at a time
  for (std::uint64_t i = first; i < std::min<std::uint64_t>(last, events.size()); ++i) {
    if (events[i].action != static_cast<std::uint32_t>(Action::alloc)) continue;
    hash = (hash ^ events[i].size) * 1099511628211ULL;
  }
  return hash;
}

void fg_counters(std::int32_t device, std::uint64_t* values) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  std::fill_n(values, FG_N_COUNTERS, 0);
  if (gpu == nullptr) return;
  const Counters& c = gpu->allocator().counters();
  const std::uint64_t found[FG_N_COUNTERS] = {c.reserved,
                                              c.allocated,
                                              c.active,
                                              c.requested,
                                              c.peak_reserved,
                                              c.peak_allocated,
                                              c.peak_active,
                                              c.peak_requested,
                                              c.retries,
                                              c.ooms,
                                              c.n_malloc,
                                              c.n_free,
                                              c.n_map,
                                              c.n_unmap,
                                              gpu->allocator().driver_free_bytes(),
                                              gpu->events().size()};
  std::copy_n(found, FG_N_COUNTERS, values);
}

void fg_last_oom(std::int32_t device, std::uint64_t* values) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  std::fill_n(values, FG_N_OOM, 0);
  if (gpu == nullptr) return;
  const OomFigures f = gpu->allocator().last_oom();
  const std::uint64_t found[FG_N_OOM] = {
      f.requested_bytes, f.rounded_bytes,      f.alloc_bytes,
      f.total_bytes,     f.free_bytes,         f.allocated_bytes,
      f.reserved_bytes,  f.private_free_bytes, f.fraction_is_set ? 1ULL : 0ULL,
      f.allowed_bytes,   f.reserve_bytes};
  std::copy_n(found, FG_N_OOM, values);
}

void fg_events(std::int32_t device, std::uint64_t first, std::uint64_t count, fg_event* events) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu == nullptr) return;
  const std::vector<fg_event>& all = gpu->events();
  if (first >= all.size()) return;
  const std::uint64_t n = std::min<std::uint64_t>(count, all.size() - first);
  std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(first), n, events);
}

void fg_layout_size(std::int32_t device, std::uint64_t* n_segments, std::uint64_t* n_blocks) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  *n_segments = *n_blocks = 0;
  if (gpu == nullptr) return;
  for (const SegmentView& s : gpu->allocator().layout()) {
    ++*n_segments;
    *n_blocks += s.blocks.size();
  }
}

void fg_layout(std::int32_t device, fg_segment* segments, fg_block* blocks) {
  const Lock lock(world().mutex);
  Gpu* gpu = gpu_at(device);
  if (gpu == nullptr) return;
  for (const SegmentView& s : gpu->allocator().layout()) {
    *segments++ = {s.address + gpu->offset(),
                   s.size,
                   handle_of(s.stream),
                   s.pool,
                   s.is_small ? 1U : 0U,
                   s.is_expandable ? 1U : 0U,
                   static_cast<std::uint32_t>(s.blocks.size())};
    for (const BlockView& b : s.blocks) {
      const std::uint64_t address = b.address + gpu->offset();
      *blocks++ = {address, b.size, b.requested, static_cast<std::uint32_t>(b.state),
                   gpu->stack_at(address)};
    }
  }
}

void* fg_guard_method(const char* name) { return find(guard_methods(), name); }

void* fg_hook_method(const char* name) { return find(hook_methods(), name); }

void fg_set_pinned_allocator(void* allocator) { world().pinned_allocator = allocator; }

}  // extern "C"
