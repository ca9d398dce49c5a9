// Binds the snapshot reader: bytes come from a Python object with readinto(), columns go to numpy.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <random>
#include <stdexcept>

#include "json_reader.h"
#include "pickle_reader.h"

namespace nb = nanobind;
using fragdoctor::Column;
using fragdoctor::ReadError;
using fragdoctor::Setting;
using fragdoctor::SnapshotTables;

namespace {

// Python's lock is held only while Python is asked for more bytes.
class PythonSource : public fragdoctor::ByteSource {
 public:
  explicit PythonSource(nb::handle stream) : readinto_(stream.attr("readinto")) {}

  size_t read(uint8_t* into, size_t room) override {
    nb::gil_scoped_acquire lock;
    nb::object view = nb::steal(PyMemoryView_FromMemory(
        reinterpret_cast<char*>(into), static_cast<Py_ssize_t>(room), PyBUF_WRITE));
    if (!view.is_valid()) throw nb::python_error();
    const Release release{view};
    const auto got = nb::cast<size_t>(readinto_(view));
    if (got > room) throw std::runtime_error("readinto() returned more than there was room for");
    return got;
  }

 private:
  // The window must not outlive the call, even if the call raises.
  struct Release {
    nb::handle view;
    ~Release() {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      Py_XDECREF(PyObject_CallMethod(view.ptr(), "release", nullptr));
      PyErr_Clear();
      PyErr_Restore(type, value, trace);
    }
  };

  nb::object readinto_;
};

template <class T>
nb::object array(Column<T>& column) {
  const size_t n = column.size();
  T* data = column.release();
  nb::capsule owner(data == nullptr ? static_cast<void*>(std::malloc(1)) : data,
                    [](void* p) noexcept { std::free(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(data, {n}, owner));
}

// The same for what many files do not say: if all of `n` values are equal, one stands for them all.
template <class T>
nb::object repeated(Column<T>& column, size_t n) {
  for (size_t i = 1; i < column.size(); ++i)
    if (column[i] != column[0]) return array(column);
  if (n < 2) return array(column);
  column.truncate(1);
  column.shrink_to_fit();
  T* data = column.release();
  const nb::capsule owner(data, [](void* p) noexcept { std::free(p); });
  return nb::cast(nb::ndarray<nb::numpy, const T, nb::ndim<1>>(data, {n}, owner, {0}));
}

nb::object bools(Column<uint8_t>& column) { return array(column).attr("view")("bool"); }

nb::str text(const std::string& utf8) { return nb::str(utf8.data(), utf8.size()); }

nb::dict counts(const std::vector<std::pair<std::string, uint64_t>>& from) {
  nb::dict out;
  for (const auto& [name, times] : from) out[text(name)] = times;
  return out;
}

nb::dict settings_dict(const std::vector<Setting>& settings) {
  std::vector<nb::dict> open(1);
  std::vector<nb::str> names;
  for (const Setting& s : settings) {
    if (s.type == Setting::Type::dict_begin) {
      names.push_back(text(s.key));
      open.emplace_back();
      continue;
    }
    if (s.type == Setting::Type::dict_end) {
      nb::dict inner = open.back();
      open.pop_back();
      open.back()[names.back()] = inner;
      names.pop_back();
      continue;
    }
    nb::object value = nb::none();
    if (s.type == Setting::Type::boolean) value = nb::bool_(s.integer != 0);
    if (s.type == Setting::Type::integer) value = nb::int_(s.integer);
    if (s.type == Setting::Type::large_integer) {
      value = nb::int_(static_cast<uint64_t>(s.integer));
    }
    if (s.type == Setting::Type::real) value = nb::float_(s.real);
    if (s.type == Setting::Type::string) value = text(s.text);
    open.back()[text(s.key)] = value;
  }
  return open.front();
}

nb::dict segment_columns(fragdoctor::SegmentColumns& s) {
  nb::dict out;
  out["device"] = array(s.device);
  out["address"] = array(s.address);
  out["total_bytes"] = array(s.total_bytes);
  out["allocated_bytes"] = array(s.allocated_bytes);
  out["active_bytes"] = array(s.active_bytes);
  out["requested_bytes"] = array(s.requested_bytes);
  out["stream"] = array(s.stream);
  out["kind"] = array(s.kind);
  out["pool"] = array(s.pool);
  out["is_expandable"] = bools(s.is_expandable);
  out["stack"] = array(s.stack);
  out["block_offsets"] = array(s.block_offsets);
  return out;
}

nb::dict block_columns(fragdoctor::BlockColumns& b) {
  nb::dict out;
  out["segment"] = array(b.segment);
  out["address"] = array(b.address);
  out["size_bytes"] = array(b.size_bytes);
  out["requested_bytes"] = array(b.requested_bytes);
  out["state"] = array(b.state);
  out["stack"] = array(b.stack);
  return out;
}

nb::dict event_columns(fragdoctor::EventColumns& e, fragdoctor::Column<int64_t>& offsets) {
  nb::dict out;
  out["action"] = array(e.action);
  out["address"] = array(e.address);
  out["size_bytes"] = array(e.size_bytes);
  out["stream"] = array(e.stream);
  out["time_us"] = repeated(e.time_us, e.time_us.size());
  out["stack"] = array(e.stack);
  out["pool"] = array(e.pool);
  out["compile_context"] = repeated(e.compile_context.values(), e.compile_context.size());
  out["user_metadata"] = repeated(e.user_metadata.values(), e.user_metadata.size());
  out["offsets"] = array(offsets);
  return out;
}

nb::dict keys_seen(const SnapshotTables& t) {
  using namespace fragdoctor;
  nb::dict out;
  const std::pair<const char*, Shape> shapes[] = {{"top", Shape::top},
                                                  {"segment", Shape::segment},
                                                  {"block", Shape::block},
                                                  {"event", Shape::event},
                                                  {"frame", Shape::frame}};
  for (const auto& [name, shape] : shapes) {
    nb::list keys;
    for (int i = 0; i < kNKeys; ++i) {
      if ((t.keys_seen[static_cast<int>(shape)] >> i & 1) != 0) keys.append(kKeyNames[i]);
    }
    out[name] = keys;
  }
  return out;
}

nb::dict to_python(SnapshotTables& t) {
  nb::dict out;
  nb::list strings;
  for (const std::string& s : t.strings) strings.append(text(s));
  out["strings"] = strings;
  out["frame_filename"] = array(t.frame_filename);
  out["frame_line"] = array(t.frame_line);
  out["frame_name"] = array(t.frame_name);
  out["stack_offsets"] = array(t.stack_offsets);
  out["stack_frames"] = array(t.stack_frames);
  out["streams"] = array(t.streams);
  out["pools"] = array(t.pools);
  out["segments"] = segment_columns(t.segments);
  out["blocks"] = block_columns(t.blocks);
  out["events"] = event_columns(t.events, t.event_offsets);
  out["host_events"] = event_columns(t.host_events, t.host_event_offsets);
  out["oom_rows"] = array(t.oom_rows);
  out["oom_free_bytes"] = array(t.oom_free_bytes);
  out["annotation_device"] = array(t.annotations.device);
  out["annotation_time_us"] = array(t.annotations.time_us);
  out["annotation_name"] = array(t.annotations.name);
  out["annotation_stage"] = array(t.annotations.stage);
  out["host_address"] = array(t.host_segments.address);
  out["host_size_bytes"] = array(t.host_segments.size_bytes);
  out["host_flags"] = array(t.host_segments.flags);
  out["settings"] = t.has_settings ? nb::object(settings_dict(t.settings)) : nb::none();
  out["unknown_keys"] = counts(t.unknown_keys);
  out["unknown_values"] = counts(t.unknown_values);
  out["n_replaced_strings"] = t.n_replaced_strings;
  out["is_list"] = t.is_list;
  out["keys_seen"] = keys_seen(t);
  out["actions_seen"] = t.actions_seen;
  out["protocol"] = t.protocol;
  out["writer"] = t.writer;
  out["n_bytes"] = t.n_bytes;
  out["has_trailing_bytes"] = t.has_trailing_bytes;
  return out;
}

const char* kind_name(fragdoctor::ErrorKind kind) {
  switch (kind) {
    case fragdoctor::ErrorKind::not_a_snapshot: return "not_a_snapshot";
    case fragdoctor::ErrorKind::truncated: return "truncated";
    case fragdoctor::ErrorKind::refused: return "refused";
    default: return "limit";
  }
}

uint64_t random_seed() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

using Reader = SnapshotTables (*)(fragdoctor::ByteSource&, const fragdoctor::ReadLimits&, uint64_t);

nb::dict read_with(Reader reader, nb::handle error_type, nb::handle stream, uint32_t max_depth,
                   uint64_t max_string_bytes, uint32_t max_unknown_keys) {
  PythonSource source(stream);
  const fragdoctor::ReadLimits limits{max_depth, max_string_bytes, max_unknown_keys};
  try {
    SnapshotTables tables = [&] {
      nb::gil_scoped_release unlocked;
      return reader(source, limits, random_seed());
    }();
    return to_python(tables);
  } catch (const ReadError& error) {
    nb::object offset =
        error.offset() == fragdoctor::kNoOffset ? nb::none() : nb::object(nb::int_(error.offset()));
    nb::tuple args =
        nb::make_tuple(kind_name(error.kind()), text(error.message()), text(error.hint()), offset);
    PyErr_SetObject(error_type.ptr(), args.ptr());
    throw nb::python_error();
  }
}

void bind_reader(nb::module_& m, const char* name, Reader reader, nb::object error_type,
                 const char* doc) {
  m.def(
      name,
      [error_type, reader](nb::object stream, uint32_t max_depth, uint64_t max_string_bytes,
                           uint32_t max_unknown_keys) {
        return read_with(reader, error_type, stream, max_depth, max_string_bytes, max_unknown_keys);
      },
      nb::arg("stream"), nb::kw_only(), nb::arg("max_depth"), nb::arg("max_string_bytes"),
      nb::arg("max_unknown_keys"), doc);
}

}  // namespace

void bind_pickle_reader(nb::module_& m) {
  nb::object error_type = nb::steal(PyErr_NewExceptionWithDoc(
      "fragdoctor._native._ext.ReadError",
      "The reader's error: args are (kind, message, hint, offset).", nullptr, nullptr));
  m.attr("ReadError") = error_type;
  bind_reader(m, "read_pickle", &fragdoctor::read_pickle, error_type,
              "Read a pickled snapshot from an object with readinto().");
  bind_reader(m, "read_json", &fragdoctor::read_json, error_type,
              "Read a snapshot written as JSON from an object with readinto().");
}
