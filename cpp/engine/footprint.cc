#include "helm/footprint.h"

#include <algorithm>
#include <unordered_map>
#include <variant>

#include "base/arena.h"
#include "cpu/key_bias.h"
#include "cpu/workspace.h"
#include "plan/cuda_scratch.h"
#include "plan/reader.h"
#include "plan/stages.h"

namespace helm {
namespace {

constexpr Format kAnyPacked = {Codes::kC8, Scales::kS, 32, 128};

void check(const char* name, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return;
  fail(ErrorKind::kInvalid, "[footprint] ", name, " is ", value, "; expected 1 to ", most);
}

}  // namespace

class Footprint::Impl {
 public:
  explicit Impl(Plan graph);

  bool set(const Setting& setting);  // false: more than 64 TiB
  int64_t cpu_bytes(std::span<const std::string> units, int threads) const;
  int64_t cuda_bytes(std::span<const std::string> units) const;
  int64_t far_bytes(std::span<const std::string> units, int threads) const;

 private:
  const UnitSpec& unit(const std::string& name) const;

  Plan plan_;
  bool packed_ = false;
  std::unordered_map<std::string, size_t> unit_index_;
  int64_t widest_partial_ = 1;  // of attention to a row, elements
  int64_t bias_bytes_ = 0;      // of a layer's keys, where they are held without their bias
};

Footprint::Impl::Impl(Plan graph) : plan_(std::move(graph)) {
  for (size_t u = 0; u < plan_.units.size(); ++u) {
    unit_index_.emplace(plan_.units[u].name, u);
    const AttentionOp* attention = attention_of(plan_.units[u]);
    if (attention != nullptr) {
      widest_partial_ = std::max(widest_partial_, attention->partial_width());
    }
  }
  plan_.kv.dtype = DType::kI8;  // which lacks biases, if any does
  for (int64_t entry = 0; entry < plan_.kv.entries(); ++entry) {
    if (const auto bias = cpu::key_bias(plan_, entry)) {
      bias_bytes_ = std::max(bias_bytes_, align_up(cpu::tensor_bytes(plan_, *bias), kCacheLine));
    }
  }
}

const UnitSpec& Footprint::Impl::unit(const std::string& name) const {
  const auto found = unit_index_.find(name);
  if (found == unit_index_.end()) {
    fail(ErrorKind::kInvalid, "[footprint] the graph has no unit \"", name, "\"");
  }
  return plan_.units[found->second];
}

bool Footprint::Impl::set(const Setting& setting) {
  const Limits& limits = setting.limits;
  check("context", limits.context, kMaxExtent);
  check("step_tokens", limits.step_tokens, kMaxCount);
  check("step_outputs", limits.step_outputs, limits.step_tokens);
  check("sequences", limits.sequences, limits.step_outputs);
  check("page_tokens", setting.page_tokens, kMaxCount);
  check("threads", setting.threads, kMostThreads);
  plan_.limits = limits;
  plan_.kv.dtype = setting.kv_dtype;
  plan_.kv.page_tokens = setting.page_tokens;
  packed_ = setting.packed;
  // Partial results, or tables of pages, in f32 or int32.
  const int64_t pages = (limits.context + setting.page_tokens - 1) / setting.page_tokens;
  const int64_t words = std::max(widest_partial_, plan_.kv.entries());
  return limits.sequences <= kMaxOffset / int64_t{sizeof(float)} / words / pages;
}

int64_t Footprint::Impl::cpu_bytes(std::span<const std::string> units, int threads) const {
  cpu::Workspace workspace(plan_, cpu::most_scratch_bytes);
  for (const std::string& name : units) workspace.add(unit(name));
  return workspace.bytes(threads);
}

int64_t Footprint::Impl::cuda_bytes(std::span<const std::string> units) const {
  cuda::Scratch scratch(plan_, cuda::kMostBlasBytes, cuda::kMostMultiprocessors);
  const Format most = packed_ ? kAnyPacked : format_of(DType::kF16);
  const auto format = [&](TensorIndex) { return most; };
  for (const std::string& name : units) scratch.add(unit(name), format);
  return scratch.bytes();
}

int64_t Footprint::Impl::far_bytes(std::span<const std::string> units, int threads) const {
  cpu::Workspace far(plan_, cpu::most_scratch_bytes);
  for (const std::string& name : units) {
    const AttentionOp* attention = attention_of(unit(name));
    if (attention != nullptr) {
      far.attend(attention->heads, attention->kv_heads, attention->head_dim);
    }
  }
  const bool biased = kv_scale_bytes(plan_.kv.dtype) > 0;
  const int64_t biases = biased ? plan_.kv.entries() * bias_bytes_ : 0;  // any may lie there
  return align_up(far.bytes(threads), kCacheLine) + biases;
}

Footprint::Footprint(std::string_view graph) {
  const JsonDocument document(graph, "graph", "not valid JSON");
  impl_ = std::make_unique<Impl>(PlanReader().read_graph(document.root()));
}

Footprint::~Footprint() = default;

int64_t Footprint::workspace(std::span<const std::string> units, DeviceKind device,
                             const Setting& setting) {
  if (units.empty()) return 0;
  if (!impl_->set(setting)) return kMaxOffset;
  if (device == DeviceKind::kCpu) return impl_->cpu_bytes(units, setting.threads);
  const int64_t simulated = impl_->cpu_bytes(units, 1);
  return std::max(impl_->cuda_bytes(units), simulated);
}

int64_t Footprint::far_workspace(std::span<const std::string> units, const Setting& setting) {
  return impl_->set(setting) ? impl_->far_bytes(units, setting.threads) : kMaxOffset;
}

}  // namespace helm
