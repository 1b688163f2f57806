// The Python module helm._helm: conversions, docstrings and GIL handling, no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bindings.h"
#include "helm/engine.h"
#include "helm/machine.h"

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

TensorView view_of(const std::string& name, const AnyArray& array) {
  TensorView view;
  view.data = array.data();
  view.dtype = dtype_of(name, array.dtype());
  for (size_t i = 0; i < array.ndim(); ++i) view.shape.push_back(array.shape(i));
  // The reference is dropped with the GIL held, wherever the engine happens to be destroyed.
  view.owner = std::shared_ptr<void>(new AnyArray(array), [](void* owner) {
    const nb::gil_scoped_acquire acquired;
    delete static_cast<AnyArray*>(owner);
  });
  return view;
}

std::shared_ptr<SharedEngine> make_engine(const std::string& plan, const std::string& directory,
                                          const nb::dict& tensors, int threads, bool mapped,
                                          const std::string& device, Progress progress) {
  EngineOptions options;
  options.directory = directory;
  options.threads = threads;
  options.device = device;
  options.loading = mapped ? WeightLoading::kMapped : WeightLoading::kCopied;
  for (const auto& [key, value] : tensors) {
    const auto name = nb::cast<std::string>(key);
    options.tensors.emplace(name, view_of(name, nb::cast<AnyArray>(value)));
  }
  if (progress) options.progress = interruptible(std::move(progress));
  const nb::gil_scoped_release released;
  return std::make_shared<SharedEngine>(Plan::from_json(plan), std::move(options));
}

nb::object forward(SharedEngine& shared, SequenceId sequence, const TokenArray& tokens, bool all) {
  const auto vocab = static_cast<size_t>(shared.engine.plan().vocab_size);
  const std::span<const int32_t> ids(tokens.data(), tokens.size());
  auto* logits = new std::vector<float>();
  const nb::capsule owner(logits,
                          [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  locked(shared, [&](Engine& engine) {
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

nb::dict stats(const SharedEngine& shared) {
  const EngineStats s = shared.engine.stats();
  nb::dict out;
  nb::list devices;
  for (const DeviceUse& use : s.devices) devices.append(use_dict(use));
  out["devices"] = devices;
  out["crossings"] = s.crossings;
  out["streamed_steps"] = s.streamed_steps;
  out["evicted_blocks"] = s.evicted_blocks;
  out["cpu_attentions"] = s.cpu_attentions;
  out["page_visits"] = s.page_visits;
  out["weights_bytes"] = s.weights_bytes;
  out["decode_bytes"] = s.decode_bytes;
  out["kv_bytes"] = s.kv_bytes;
  out["kv_token_bytes"] = s.kv_token_bytes;
  out["activations_bytes"] = s.activations_bytes;
  out["workspace_bytes"] = s.workspace_bytes;
  out["threads"] = s.threads;
  out["isa"] = s.isa;
  out["huge_pages"] = s.huge_pages;
  out["load_s"] = s.load_s;
  return out;
}

nb::list tiers() {
  nb::list out;
  for (const IsaTier& tier : isa_tiers()) {
    nb::dict entry;
    entry["name"] = tier.name;
    entry["available"] = tier.available;
    entry["reason"] = tier.reason;
    out.append(entry);
  }
  return out;
}

double stream_read(int threads, int64_t bytes, double seconds) {
  const nb::gil_scoped_release released;
  return stream_read_bytes_per_s(threads, bytes, seconds);
}

double fma(int threads, double seconds) {
  const nb::gil_scoped_release released;
  return fma_flops(threads, seconds);
}

// Without the GIL: a probe runs for a fraction of a second.
template <typename... Args>
auto probe(std::vector<ProbeTiming> (StageProbe::*method)(Args...)) {
  return [method](StageProbe& self, Args... args) {
    const nb::gil_scoped_release released;
    return (self.*method)(args...);
  };
}

void raise_helm_error(const Error& error) {
  static constexpr const char* kClasses[] = {"InvalidError", "OutOfMemoryError", "CapacityError",
                                             "CheckpointError", "DeviceError"};
  const nb::module_ errors = nb::module_::import_("helm.errors");
  PyErr_SetString(errors.attr(kClasses[static_cast<int>(error.kind())]).ptr(), error.what());
}

void bind_engine(nb::module_& m) {
  nb::class_<SharedEngine>(m, "Engine", "A loaded model: weights, KV pool and compiled stages.")
      .def(
          nb::new_(&make_engine), "plan"_a, "directory"_a = "", "tensors"_a = nb::dict(),
          "threads"_a = 0, "mapped"_a = false, "device"_a = "cuda",
          "progress"_a.none() = nb::none(),
          "Loads the plan's weights from files under `directory` or from `tensors` (name to\n"
          "contiguous CPU array, used in place when its dtype is the planned one). `progress` "
          "gets\n"
          "(done, total) bytes and may raise to cancel. threads = 0: as planned. mapped: tensors "
          "that\n"
          "need no conversion are read from the file's pages instead of being copied. device: the\n"
          "plan's accelerator, see accelerator_info.")
      .def(
          "open",
          [](SharedEngine& s, int64_t capacity) {
            return locked(s, [&](Engine& engine) { return engine.open(capacity); });
          },
          "capacity"_a, "Opens a sequence of up to `capacity` positions; returns its id.")
      .def(
          "close",
          [](SharedEngine& s, SequenceId id) {
            locked(s, [&](Engine& engine) { engine.close(id); });
          },
          "sequence"_a, "Closes a sequence and frees its pages.")
      .def(
          "length",
          [](SharedEngine& s, SequenceId id) {
            return locked(s, [&](Engine& engine) { return engine.length(id); });
          },
          "sequence"_a, "Cached positions of a sequence.")
      .def(
          "truncate",
          [](SharedEngine& s, SequenceId id, int64_t length) {
            locked(s, [&](Engine& engine) { engine.truncate(id, length); });
          },
          "sequence"_a, "length"_a, "Forgets the positions from `length` on.")
      .def("forward", &forward, "sequence"_a, "tokens"_a, "all"_a = false,
           "Appends tokens (int32 [n]); returns f32 logits, [1, vocab] of the last token or\n"
           "[n, vocab] with all=True.")
      .def_prop_ro("stats", &stats,
                   "Bytes in all and by device, threads, kernel tier and load time.");
}

void bind_machine(nb::module_& m) {
  nb::class_<DeviceInfo>(m, "DeviceInfo", "A device and its memory.")
      .def_ro("kind", &DeviceInfo::kind)
      .def_ro("name", &DeviceInfo::name)
      .def_ro("memory_bytes", &DeviceInfo::memory_bytes)
      .def_ro("free_bytes", &DeviceInfo::free_bytes);
  m.def("isa_tiers", &tiers, "Every kernel tier: name, available, reason.");
  m.def(
      "isa_choice",
      [] {
        const IsaChoice choice = isa_choice();
        return nb::make_tuple(choice.name, choice.reason);
      },
      "The tier in use and why: (name, reason).");
  m.def(
      "accelerator_info",
      [](const std::string& specification) {
        const nb::gil_scoped_release released;
        return accelerator_info(specification);
      },
      "specification"_a,
      "Opens cuda, cuda:N or sim:vram=2GiB,link=16GB/s,latency=10us,threads=1 and says what it "
      "is.\nRaises InvalidError for another specification, DeviceError with the reason if it "
      "cannot be had.");
  m.def("stream_read_bytes_per_s", &stream_read, "threads"_a, "bytes"_a = int64_t{1} << 30,
        "seconds"_a = 0.5, "The machine's streaming-read ceiling, bytes/s.");
  m.def("fma_flops", &fma, "threads"_a, "seconds"_a = 0.2,
        "The machine's f32 multiply-add peak in the chosen tier, FLOP/s.");
}

void bind_probe(nb::module_& m) {
  nb::class_<ProbeTiming>(m, "ProbeTiming", "What one run of an op does, and how long runs took.")
      .def_ro("flops", &ProbeTiming::flops)
      .def_ro("bytes", &ProbeTiming::bytes)
      .def_ro("run_s", &ProbeTiming::run_s)
      .def_ro("undisturbed_s", &ProbeTiming::undisturbed_s,
              "Of the runs, those during which every thread kept its core.");
  nb::class_<StageProbe>(m, "StageProbe",
                         "Times the engine's own ops on a synthetic block. Every call runs for\n"
                         "about `seconds` and returns a timing per shape of op.")
      .def(nb::init<int64_t, std::vector<int>>(), "bytes"_a, "cpus"_a = std::vector<int>(),
           nb::call_guard<nb::gil_scoped_release>(),
           "Fills `bytes` of weights, which should exceed every cache several times. Thread i\n"
           "stays on CPU cpus[i] while a probe runs.")
      .def(
          "matmul",
          [](StageProbe& self, int threads, const std::string& dtype, int64_t tokens,
             double seconds) {
            const nb::gil_scoped_release released;
            return self.matmul(threads, dtype_from_name(dtype), tokens, seconds);
          },
          "threads"_a, "dtype"_a, "tokens"_a, "seconds"_a,
          "Products of `tokens` rows with different matrices; bytes of the matrices.")
      .def(
          "attention",
          [](StageProbe& self, int threads, const std::string& dtype, int64_t group,
             int64_t queries, int64_t context, double seconds) {
            const nb::gil_scoped_release released;
            return self.attention(threads, dtype_from_name(dtype), group, queries, context,
                                  seconds);
          },
          "threads"_a, "dtype"_a, "group"_a, "queries"_a, "context"_a, "seconds"_a,
          "Attention of the last `queries` of `context` positions, `group` query heads per KV\n"
          "head; bytes of the KV read.")
      .def("elementwise", probe(&StageProbe::elementwise), "threads"_a, "tokens"_a, "seconds"_a,
           "Norms and a gated activation; bytes read and written.")
      .def("empty_ops", probe(&StageProbe::empty_ops), "threads"_a, "ops"_a, "seconds"_a,
           "A stage of `ops` that have no work: dispatch and barrier.");
}

void bind_device_probe(nb::module_& m) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<DeviceProbe>(m, "DeviceProbe",
                          "Times an accelerator and its link on the same ops. Every call runs for\n"
                          "about `seconds`.")
      .def(nb::init<const std::string&, int64_t>(), "specification"_a, "bytes"_a, Released(),
           "Opens what accelerator_info() describes and fills `bytes` of it with weights.")
      .def(
          "matmul",
          [](DeviceProbe& self, const std::string& dtype, int64_t tokens, double seconds) {
            const nb::gil_scoped_release released;
            return self.matmul(dtype_from_name(dtype), tokens, seconds);
          },
          "dtype"_a, "tokens"_a, "seconds"_a,
          "Products of `tokens` rows with different matrices; bytes of the matrices.")
      .def(
          "attention",
          [](DeviceProbe& self, const std::string& dtype, int64_t group, int64_t queries,
             int64_t context, double seconds) {
            const nb::gil_scoped_release released;
            return self.attention(dtype_from_name(dtype), group, queries, context, seconds);
          },
          "dtype"_a, "group"_a, "queries"_a, "context"_a, "seconds"_a, "Attention as StageProbe's.")
      .def("elementwise", &DeviceProbe::elementwise, "tokens"_a, "seconds"_a, Released(),
           "Norms and a gated activation; bytes read and written.")
      .def("empty_ops", &DeviceProbe::empty_ops, "ops"_a, "seconds"_a, Released(),
           "A stage of `ops` that have no work.")
      .def("empty_step", &DeviceProbe::empty_step, "crossings"_a, "seconds"_a, Released(),
           "A stage without ops that the host waits for, with a small copy there and back or none.")
      .def("copy", &DeviceProbe::copy, "to_device"_a, "page_locked"_a, "seconds"_a, Released(),
           "One large copy from or to page-locked or other host memory.");
}

}  // namespace
}  // namespace helm

NB_MODULE(_helm, m) {
  m.doc() = "HELM's native runtime.";
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const helm::Error& error) {
      helm::raise_helm_error(error);
    }
  });
  helm::bind_engine(m);
  helm::bind_generation(m);
  helm::bind_machine(m);
  helm::bind_probe(m);
  helm::bind_device_probe(m);
}
