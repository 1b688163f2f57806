// The Python module helm._helm: conversions, docstrings and GIL handling, no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <filesystem>
#include <memory>
#include <string_view>

#include "bindings.h"
#include "helm/engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

using TokenArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

DType dtype_of(const std::string& name, const nb::dlpack::dtype& dtype) {
  if (dtype == nb::dtype<float>()) return DType::kF32;
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float) && dtype.bits == 16) {
    return DType::kF16;
  }
  if (dtype.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat) && dtype.bits == 16) {
    return DType::kBF16;
  }
  throw Error(ErrorKind::kInvalid, "[load] tensor \"" + name + "\" is not f32, f16 or bf16");
}

// Buffers of several dimensions without strides, as numpy's datetimes are, which nanobind would
// read all the same.
bool lacks_strides(nb::handle value) {
  Py_buffer buffer{};
  if (PyObject_CheckBuffer(value.ptr()) == 0) return false;
  if (PyObject_GetBuffer(value.ptr(), &buffer, PyBUF_RECORDS_RO) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool lacks = buffer.ndim > 0 && buffer.strides == nullptr;
  PyBuffer_Release(&buffer);
  return lacks;
}

// `value` as an Array; TypeError, saying what was expected, for what is none.
template <typename Array>
Array array_of(nb::handle value, const std::string& expected) {
  Array array;
  if (lacks_strides(value) || !nb::try_cast(value, array)) {
    throw nb::type_error((expected + ", got " + nb::inst_name(value).c_str()).c_str());
  }
  return array;
}

TensorView view_of(const std::string& name, const AnyArray& array) {
  TensorView view;
  view.data = array.data();
  view.dtype = dtype_of(name, array.dtype());
  for (size_t i = 0; i < array.ndim(); ++i) view.shape.push_back(array.shape(i));
  view.owner = shared_object(AnyArray(array));
  return view;
}

std::shared_ptr<SharedEngine> make_engine(const std::string& plan,
                                          const std::filesystem::path& directory,
                                          const nb::dict& tensors, int threads,
                                          const std::string& device, const Listener& progress,
                                          std::vector<int> cpus, double cpu_bytes_per_s,
                                          double node_bytes_per_s, double disk_bytes_per_s,
                                          const std::vector<std::filesystem::path>& copies) {
  EngineOptions options;
  options.directory = directory.string();
  for (const std::filesystem::path& copy : copies) options.copies.push_back(copy.string());
  options.threads = threads;
  options.cpus = std::move(cpus);
  options.pace = {cpu_bytes_per_s, node_bytes_per_s, disk_bytes_per_s};
  options.device = device;
  options.cublas_directories = cublas_directories();
  for (const auto& [key, value] : tensors) {
    std::string name;
    if (!nb::try_cast(key, name)) throw nb::type_error("[load] names of tensors must be text");
    const std::string expected = "[load] tensor \"" + name + "\" must be a contiguous CPU array";
    options.tensors.emplace(name, view_of(name, array_of<AnyArray>(value, expected)));
  }
  options.progress = interruptible(progress);
  const Released released;
  return std::make_shared<SharedEngine>(Plan::from_json(plan), std::move(options));
}

nb::object forward(SharedEngine& shared, SequenceId sequence, nb::handle given, bool all) {
  const auto tokens = array_of<TokenArray>(given, "[engine] tokens must be an int32 array [n]");
  const auto vocab = static_cast<size_t>(shared.plan().vocab_size);
  const std::span<const int32_t> ids(tokens.data(), tokens.size());
  auto* logits = new std::vector<float>();
  const nb::capsule owner(logits,
                          [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  shared.locked([&](Engine& engine) {
    logits->reserve((all ? ids.size() : 1) * vocab);
    engine.forward(sequence, ids, all ? StepInput::Outputs::kAll : StepInput::Outputs::kLast,
                   [&](std::span<const float> rows) {
                     logits->insert(logits->end(), rows.begin(), rows.end());
                   });
  });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
      logits->data(), {logits->size() / vocab, vocab}, owner));
}

nb::dict use_dict(const DeviceUse& use) {
  nb::dict out;
  out["device"] = use.device;
  out["kind"] = use.kind;
  out["name"] = use.name;
  out["weights_bytes"] = use.weights_bytes;
  out["kv_bytes"] = use.kv_bytes;
  out["activations_bytes"] = use.activations_bytes;
  out["workspace_bytes"] = use.workspace_bytes;
  out["staging_bytes"] = use.staging_bytes;
  out["peak_bytes"] = use.peak_bytes;
  out["budget_bytes"] = use.budget_bytes;
  return out;
}

nb::dict stats(SharedEngine& shared) {
  const EngineStats s = shared.read([](const Engine& engine) { return engine.stats(); });
  nb::dict out;
  nb::list devices;
  for (const DeviceUse& use : s.devices) devices.append(use_dict(use));
  out["devices"] = devices;
  out["crossings"] = s.crossings;
  out["streamed_steps"] = s.streamed_steps;
  out["pageable_bytes"] = s.pageable_bytes;
  out["disk_step_bytes"] = s.disk_step_bytes;
  out["disk_read_bytes"] = s.disk_read_bytes;
  out["disk_used_bytes"] = s.disk_used_bytes;
  out["disk_drive_bytes"] = s.disk_drive_bytes;
  out["disk_direct"] = s.disk_direct;
  out["evicted_blocks"] = s.evicted_blocks;
  out["cpu_attentions"] = s.cpu_attentions;
  out["joint_steps"] = s.joint_steps;
  out["split_steps"] = s.split_steps;
  out["far_rows"] = s.far_rows;
  out["page_visits"] = s.page_visits;
  nb::list cpu_ops;
  for (const OpTime& time : s.cpu_ops) {
    nb::dict kind;
    kind["op"] = time.op;
    kind["runs"] = time.runs;
    kind["seconds"] = time.seconds;
    cpu_ops.append(kind);
  }
  out["cpu_ops"] = cpu_ops;
  nb::dict experts;
  experts["runs"] = s.experts.runs;
  experts["rows"] = s.experts.rows;
  experts["distinct"] = s.experts.distinct;
  experts["expected"] = s.experts.expected;
  out["experts"] = experts;
  out["weights_bytes"] = s.weights_bytes;
  out["decode_bytes"] = s.decode_bytes;
  out["kv_bytes"] = s.kv_bytes;
  out["kv_token_bytes"] = s.kv_token_bytes;
  out["activations_bytes"] = s.activations_bytes;
  out["workspace_bytes"] = s.workspace_bytes;
  out["threads"] = s.threads;
  out["active_threads"] = s.active_threads;
  out["cpus"] = s.cpus;
  out["isa"] = s.isa;
  out["copied_bytes"] = s.copied_bytes;
  nb::dict nodes;
  for (const auto& [node, bytes] : s.node_bytes) nodes[nb::int_(node)] = bytes;
  out["node_bytes"] = nodes;
  out["huge_pages"] = s.huge_pages;
  out["huge_page_bytes"] = s.huge_page_bytes;
  out["load_s"] = s.load_s;
  return out;
}

nb::list lazy_memory(SharedEngine& shared) {
  nb::list out;
  for (const auto memory : shared.read([](const Engine& engine) { return engine.lazy_memory(); })) {
    out.append(nb::make_tuple(reinterpret_cast<uintptr_t>(memory.data()), memory.size()));
  }
  return out;
}

void raise_helm_error(const Error& error) {
  static constexpr const char* kClasses[] = {
      "InvalidError", "OutOfMemoryError", "CapacityError", "CheckpointError",
      "DeviceError",  "CompressionError", "NoDeviceError"};
  const nb::module_ errors = nb::module_::import_("helm.errors");
  // What is quoted of a file or a path need not be UTF-8.
  const std::string_view text = error.what();
  const auto message = nb::steal(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
  if (!message.is_valid()) return;  // out of memory, as Python says
  PyErr_SetObject(errors.attr(kClasses[static_cast<int>(error.kind())]).ptr(), message.ptr());
}

void bind_engine(nb::module_& m) {
  nb::class_<SharedEngine>(m, "Engine", nb::is_weak_referenceable(),
                           "A loaded model: weights, KV pool and compiled stages.")
      .def(
          nb::new_(&make_engine), "plan"_a, "directory"_a = "", "tensors"_a = nb::dict(),
          "threads"_a = 0, "device"_a = "cuda", "progress"_a.none() = nb::none(),
          "cpus"_a = std::vector<int>(), nb::kw_only(), "cpu_bytes_per_s"_a = 0.0,
          "node_bytes_per_s"_a = 0.0, "disk_bytes_per_s"_a = 0.0,
          "copies"_a = std::vector<std::filesystem::path>(),
          "Loads the plan's weights from files under `directory` or from `tensors` (name to\n"
          "contiguous CPU array, used in place when its dtype is the format). `progress` "
          "gets\n"
          "(done, total) bytes and may raise to cancel. threads = 0: as planned, fewer\n"
          "in decode beside busy programs. device: the plan's accelerator, see\n"
          "accelerator_info. cpus: the CPU on which each thread works, the caller's first; none: "
          "wherever the system puts them. cpu_bytes_per_s, for tests of schedules: a stage on the\n"
          "CPU takes at least the weights and KV that it reads over this rate, as sim:memory=RATE\n"
          "does on the accelerator; 0: no longer than it takes. node_bytes_per_s: the same of\n"
          "weights on memory nodes that the plan names; disk_bytes_per_s: of what steps read from\n"
          "disk. copies: folders with the same files on other drives; what steps read from disk\n"
          "comes from all of them at once.")
      .def("check_process", &SharedEngine::check_process,
           "Raises InvalidError in a forked child, where no other call works either.")
      .def(
          "open",
          [](SharedEngine& s, int64_t capacity) {
            return s.locked([&](Engine& engine) { return engine.open(capacity); });
          },
          "capacity"_a, "Opens a sequence of up to `capacity` positions; returns its id.")
      .def(
          "close",
          [](SharedEngine& s, SequenceId id) {
            s.release([id](Engine& engine) { engine.close(id); });
          },
          "sequence"_a, "Closes a sequence and frees its pages.")
      .def(
          "length",
          [](SharedEngine& s, SequenceId id) {
            return s.read([&](const Engine& engine) { return engine.length(id); });
          },
          "sequence"_a, "Cached positions of a sequence.")
      .def(
          "truncate",
          [](SharedEngine& s, SequenceId id, int64_t length) {
            s.locked([&](Engine& engine) { engine.truncate(id, length); });
          },
          "sequence"_a, "length"_a, "Forgets the positions from `length` on.")
      .def("forward", &forward, "sequence"_a, "tokens"_a, "all"_a = false,
           "Appends tokens (int32 [n]); returns f32 logits, [1, vocab] of the last token or\n"
           "[n, vocab] with all=True.")
      .def(
          "count_op_times",
          [](SharedEngine& s, bool on) {
            s.locked([&](Engine& engine) { engine.count_op_times(on); });
          },
          "on"_a, "Counts the time of the CPU's ops from zero (stats: cpu_ops), or no longer.")
      .def_prop_ro("lazy_memory", &lazy_memory,
                   "(address, bytes) of the host's memory, besides weights, that the system "
                   "provides\nas it is first written.")
      .def_prop_ro("stats", &stats,
                   "Bytes in all and by device, threads and their CPUs, isa and load time.");
}

}  // namespace
}  // namespace helm

NB_MODULE(_helm, m) {
  m.doc() = "HELM's native runtime.";
  nb::set_leak_warnings(false);  // daemon threads keep theirs when the interpreter ends
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const helm::Error& error) {
      helm::raise_helm_error(error);
    }
  });
  helm::bind_engine(m);
  helm::bind_footprint(m);
  helm::bind_constraint(m);
  helm::bind_speculation(m);
  helm::bind_generation(m);
  helm::bind_machine(m);
  helm::bind_program(m);
  helm::bind_service(m);
  helm::bind_probe(m);
  helm::bind_device_probe(m);
  helm::bind_weights(m);
}
