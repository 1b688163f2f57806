// The machine's part of the module: devices, isas and probes.
#include <malloc.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "helm/machine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace helm {
namespace {

nb::list listed(const std::vector<IsaTier>& tiers) {
  nb::list out;
  for (const IsaTier& tier : tiers) {
    nb::dict entry;
    entry["name"] = tier.name;
    entry["available"] = tier.available;
    entry["reason"] = tier.reason;
    out.append(entry);
  }
  return out;
}

nb::tuple pair(const IsaChoice& choice) {
  return nb::make_tuple(choice.name, choice.reason);
}

double stream_read(int threads, int64_t bytes, double seconds) {
  const Released released;
  return stream_read_bytes_per_s(threads, bytes, seconds);
}

double fma(int threads, double seconds) {
  const Released released;
  return fma_flops(threads, seconds);
}

// Without the GIL: a probe runs for a fraction of a second.
template <typename... Args>
auto probe(std::vector<ProbeTiming> (StageProbe::*method)(Args...)) {
  return [method](StageProbe& self, Args... args) {
    const Released released;
    return (self.*method)(args...);
  };
}

}  // namespace

std::vector<std::string> cublas_directories() {
  std::vector<std::string> found;
  const nb::object look = nb::module_::import_("helm.machine.devices").attr("cublas_directories");
  for (const nb::handle place : look()) {
    const auto path = nb::cast<nb::bytes>(place);
    found.emplace_back(path.c_str(), path.size());
  }
  return found;
}

void bind_machine(nb::module_& m) {
  nb::class_<DeviceInfo>(m, "DeviceInfo", "A device and its memory.")
      .def_ro("kind", &DeviceInfo::kind)
      .def_ro("name", &DeviceInfo::name)
      .def_ro("memory_bytes", &DeviceInfo::memory_bytes)
      .def_ro("free_bytes", &DeviceInfo::free_bytes)
      .def_ro("locks_mapped", &DeviceInfo::locks_mapped);
  m.def(
      "return_freed_memory",
      [] {
#ifdef __GLIBC__
        malloc_trim(0);
#endif
      },
      "Gives the system what was freed and the heap still holds.");
  m.def("isa_tiers", [] { return listed(isa_tiers()); }, "Every isa: name, available, reason.");
  m.def(
      "isa_choice", [] { return pair(isa_choice()); }, "The tier in use and why: (name, reason).");
  m.def(
      "integer_isa_tiers", [] { return listed(integer_isa_tiers()); },
      "Every table of products of packed weights: name, available, reason.");
  m.def(
      "integer_isa_choice", [] { return pair(integer_isa_choice()); },
      "The table in use and why: (name, reason).");
  m.def(
      "accelerator_info",
      [](const std::string& specification) {
        const std::vector<std::string> cublas = cublas_directories();
        const Released released;
        return accelerator_info(specification, cublas);
      },
      "specification"_a,
      "Opens cuda, cuda:N or sim:vram=2GiB,link=16GB/s,latency=10us,threads=1 and says what it "
      "is.\nRaises InvalidError for another specification, DeviceError with the reason if it "
      "cannot be had.");
  m.def("granted_huge_page_bytes", &granted_huge_page_bytes, "bytes"_a, nb::call_guard<Released>(),
        "Touches `bytes` of fresh memory that asks for huge pages; how much the system put on\n"
        "them, None where it does not tell.");
  m.def("memory_node_refusal", &memory_node_refusal, "node"_a,
        "Why the system places no memory on this node; empty where it does.");
  m.def(
      "replace_file",
      [](const nb::bytes& path, const nb::bytes& content) {
        const std::string to(path.c_str(), path.size());
        const std::string_view text(content.c_str(), content.size());
        const Released released;
        replace_file(to, text);
      },
      "path"_a, "content"_a,
      "Puts a file with this content there, whole or not at all. Raises CheckpointError.");
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
      .def(nb::init<int64_t, std::vector<int>, int>(), "bytes"_a, "cpus"_a = std::vector<int>(),
           "node"_a = -1, nb::call_guard<Released>(),
           "Fills `bytes` of weights, which should exceed every cache several times. Thread i\n"
           "stays on CPU cpus[i] while a probe runs. node: of the memory that they lie on.")
      .def(
          "matmul",
          [](StageProbe& self, int threads, const std::string& format, int64_t tokens,
             double seconds) {
            const Released released;
            return self.matmul(threads, format_from_name(format), tokens, seconds);
          },
          "threads"_a, "format"_a, "tokens"_a, "seconds"_a,
          "Products of `tokens` rows with different matrices of a format, but for bf16c; bytes\n"
          "read of the matrices.")
      .def(
          "mapped_matvec",
          [](StageProbe& self, int threads, const std::string& dtype, double seconds) {
            const Released released;
            return self.mapped_matvec(threads, dtype_from_name(dtype), seconds);
          },
          "threads"_a, "dtype"_a, "seconds"_a,
          "Products of one row with copied matrices, then with those of a mapped file, in turn: a\n"
          "timing per shape of the former, then of the latter.")
      .def("compressed_matmul", probe(&StageProbe::compressed_matmul), "threads"_a, "tokens"_a,
           "seconds"_a,
           "Products of `tokens` rows with bf16 matrices, then with others in bf16c, in turn: a\n"
           "timing per shape of the former, then of the latter; bytes of both are those of bf16.")
      .def("copy", probe(&StageProbe::copy), "threads"_a, "seconds"_a,
           "Copying from a file in the page cache to fresh huge pages; bytes copied.")
      .def("compress", probe(&StageProbe::compress), "threads"_a, "seconds"_a,
           "Compressing bf16 weights on that way; bytes read.")
      .def(
          "attention",
          [](StageProbe& self, int threads, const std::string& dtype, int64_t kv_heads,
             int64_t group, int64_t queries, int64_t context, double seconds) {
            const Released released;
            return self.attention(threads, kv_dtype_from_name(dtype), kv_heads, group, queries,
                                  context, seconds);
          },
          "threads"_a, "dtype"_a, "kv_heads"_a, "group"_a, "queries"_a, "context"_a, "seconds"_a,
          "Attention of the last `queries` of `context` positions, `group` query heads per KV\n"
          "head; bytes of the KV read.")
      .def("elementwise", probe(&StageProbe::elementwise), "threads"_a, "tokens"_a, "seconds"_a,
           "Norms and a gated activation; bytes read and written.")
      .def("empty_ops", probe(&StageProbe::empty_ops), "threads"_a, "ops"_a, "seconds"_a,
           "A stage of `ops` that have no work: dispatch and barrier.")
      .def("handovers", probe(&StageProbe::handovers), "threads"_a, "ops"_a, "seconds"_a,
           "A stage of `ops`, a multiple of 3, with little work, each on one token's row that the\n"
           "threads wrote in the op before.");
}

void bind_device_probe(nb::module_& m) {
  using Unlocked = nb::call_guard<Released>;
  nb::class_<DeviceProbe>(m, "DeviceProbe",
                          "Times an accelerator and its link on the same ops. Every call runs for\n"
                          "about `seconds`.")
      .def(
          "__init__",
          [](DeviceProbe* self, const std::string& specification, int64_t bytes) {
            const std::vector<std::string> cublas = cublas_directories();
            const Released released;
            new (self) DeviceProbe(specification, bytes, cublas);
          },
          "specification"_a, "bytes"_a,
          "Opens what accelerator_info() describes and fills `bytes` of it with weights.")
      .def(
          "matmul",
          [](DeviceProbe& self, const std::string& format, int64_t tokens, double seconds) {
            const Released released;
            return self.matmul(format_from_name(format), tokens, seconds);
          },
          "format"_a, "tokens"_a, "seconds"_a,
          "Products of `tokens` rows with different matrices of a format; bytes of them.")
      .def(
          "attention",
          [](DeviceProbe& self, const std::string& dtype, int64_t group, int64_t queries,
             int64_t context, double seconds) {
            const Released released;
            return self.attention(kv_dtype_from_name(dtype), group, queries, context, seconds);
          },
          "dtype"_a, "group"_a, "queries"_a, "context"_a, "seconds"_a, "Attention as StageProbe's.")
      .def("elementwise", &DeviceProbe::elementwise, "tokens"_a, "seconds"_a, Unlocked(),
           "Norms and a gated activation; bytes read and written.")
      .def("empty_ops", &DeviceProbe::empty_ops, "ops"_a, "seconds"_a, Unlocked(),
           "A stage of `ops` that have no work.")
      .def("empty_step", &DeviceProbe::empty_step, "crossings"_a, "seconds"_a, Unlocked(),
           "A stage without ops that the host waits for, with a small copy there and back or none.")
      .def("copy", &DeviceProbe::copy, "to_device"_a, "page_locked"_a, "seconds"_a, Unlocked(),
           "One large copy from or to page-locked or other host memory.")
      .def("queued_copies", &DeviceProbe::queued_copies, "copies"_a, "seconds"_a, Unlocked(),
           "So many small copies to the device, each enqueued behind the one before.");
}

}  // namespace helm
