#include "engine/pipeline.h"

#include <algorithm>
#include <cstring>

#include "base/arena.h"
#include "base/check.h"
#include "cpu/stage.h"

namespace helm {
namespace {

int64_t value_bytes(const Plan& plan, ValueIndex index, int64_t tokens, int64_t outputs) {
  const ValueSpec& value = plan.values[static_cast<size_t>(index)];
  return (value.per_output ? outputs : tokens) * value.width * int64_t{sizeof(float)};
}

std::vector<StageSpan> stages_on(std::span<const StageSpan> stages, bool accelerator) {
  std::vector<StageSpan> chosen;
  std::copy_if(stages.begin(), stages.end(), std::back_inserter(chosen),
               [&](const StageSpan& stage) { return stage.on_accelerator == accelerator; });
  return chosen;
}

}  // namespace

DeviceBuffers::DeviceBuffers(const Plan& plan, std::span<const StageSpan> stages, bool accelerator,
                             int64_t kv_pages, Account& account) {
  const std::vector<bool> used = values_of(plan, units_on(plan, accelerator));
  std::vector<int64_t> offsets(plan.values.size());
  int64_t total = 0;
  for (size_t v = 0; v < used.size(); ++v) {
    if (!used[v]) continue;
    offsets[v] = total;
    total = align_up(total + value_bytes(plan, static_cast<ValueIndex>(v), plan.limits.step_tokens,
                                         plan.limits.step_outputs),
                     kDeviceAlignment);
  }
  int64_t scratch = 0;
  for (const StageSpan& stage : stages_on(stages, accelerator)) {
    scratch = std::max(scratch, account.device().workspace_bytes(plan, stage.units));
  }
  kv_ = DeviceMemory(account, kv_pages * plan.kv.page_bytes(), "the KV cache");
  activations_ = DeviceMemory(account, total, "activations");
  workspace_ = DeviceMemory(account, scratch, "the workspace");
  values_.assign(plan.values.size(), DeviceAddress::kNull);
  for (size_t v = 0; v < used.size(); ++v) {
    if (used[v]) values_[v] = activations_.address() + offsets[v];
  }
}

void StepRows::reserve(const Limits& limits) {
  const auto tokens = static_cast<size_t>(limits.step_tokens);
  token_ids.reserve(tokens);
  positions.reserve(tokens);
  output_rows.reserve(static_cast<size_t>(limits.step_outputs));
  runs.reserve(static_cast<size_t>(limits.sequences));
}

void StepRows::clear() {
  token_ids.clear();
  positions.clear();
  output_rows.clear();
  runs.clear();
}

Pipeline::Pipeline(const Plan& plan, const Weights& weights, Account& cpu, Account* accelerator)
    : plan_(plan),
      accelerator_(accelerator == nullptr ? nullptr : &accelerator->device()),
      cpu_stream_(cpu.device().create_stream()) {
  const std::vector<StageSpan> spans = stages_of(plan);
  buffers_[0] = DeviceBuffers(plan, spans, false, plan.kv.pages - plan.accelerator_pages, cpu);
  if (accelerator != nullptr) {
    stream_ = accelerator_->create_stream();
    buffers_[1] = DeviceBuffers(plan, spans, true, plan.accelerator_pages, *accelerator);
  }
  for (const StageSpan& span : spans) {
    Account& account = span.on_accelerator ? *accelerator : cpu;
    const DeviceBuffers& buffers = buffers_[span.on_accelerator];
    StageSpec spec;
    spec.plan = &plan;
    spec.units = span.units;
    spec.weights = span.on_accelerator ? weights.on_accelerator() : weights.on_cpu();
    spec.values = buffers.values();
    spec.kv = buffers.kv();
    spec.workspace = buffers.workspace();
    stages_.push_back({span, account.device().compile(spec)});
  }
  crossings_ = static_cast<int64_t>(stages_.size()) - 1;
  create_slots();
}

Pipeline::~Pipeline() = default;

void Pipeline::create_slots() {
  int64_t values = 0;
  for (const Compiled& stage : stages_) {
    int64_t bytes = 0;
    for (const ValueIndex v : stage.span.inputs) {
      bytes += value_bytes(plan_, v, plan_.limits.step_tokens, plan_.limits.step_outputs);
    }
    values = std::max(values, bytes);
  }
  for (Slot& slot : slots_) {
    slot.rows.reserve(plan_.limits);
    if (accelerator_ == nullptr) continue;
    if (values > 0) slot.values = StagingMemory(*accelerator_, values, "activations that cross");
    if (stages_.back().span.on_accelerator) {
      const int64_t bytes = value_bytes(plan_, plan_.logits, 0, plan_.limits.step_outputs);
      slot.logits = StagingMemory(*accelerator_, bytes, "logits");
    }
    slot.done = accelerator_->create_event();
  }
}

int64_t Pipeline::staging_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : slots_) bytes += slot.values.bytes() + slot.logits.bytes();
  return bytes;
}

int64_t Pipeline::bytes_of(ValueIndex value, const Slot& slot) const {
  const StepView step = slot.rows.view();
  return value_bytes(plan_, value, step.tokens(), step.outputs());
}

void Pipeline::submit() {
  if (!failure_.empty()) {
    fail(ErrorKind::kDevice, "[engine] a device failed before (", failure_,
         "); load the model anew");
  }
  Slot& slot = slots_[next_];
  slot.next_stage = 0;
  slot.kept.clear();
  next_ = (next_ + 1) % slots_.size();
  ++in_flight_;
  try {
    advance(slot);
  } catch (const Error& error) {
    failure_ = error.what();
    throw;
  }
}

// Runs stages up to and including the next one on the accelerator, which is only enqueued.
void Pipeline::advance(Slot& slot) {
  while (slot.next_stage < stages_.size()) {
    Compiled& stage = stages_[slot.next_stage];
    if (stage.span.on_accelerator) {
      run_on_accelerator(stage, slot);
      ++slot.next_stage;
      slot.awaited = true;
      return;
    }
    std::byte* from = slot.values.data();
    for (const ValueIndex v : stage.span.inputs) {
      const int64_t bytes = bytes_of(v, slot);
      std::memcpy(cpu::host_pointer(buffers_[0].value(v)), from, static_cast<size_t>(bytes));
      from += bytes;
    }
    stage.stage->run(*cpu_stream_, slot.rows.view());
    ++slot.next_stage;
  }
}

// Hands the stage its inputs, enqueues it, and asks for what the stage after it or the caller
// needs.
void Pipeline::run_on_accelerator(Compiled& stage, Slot& slot) {
  std::byte* staging = slot.values.data();
  for (const ValueIndex v : stage.span.inputs) {
    const int64_t bytes = bytes_of(v, slot);
    std::memcpy(staging, cpu::host_pointer(buffers_[0].value(v)), static_cast<size_t>(bytes));
    stream_->upload(buffers_[1].value(v), staging, bytes);
    staging += bytes;
  }
  stage.stage->run(*stream_, slot.rows.view());
  if (slot.next_stage + 1 < stages_.size()) {
    // In stream order the inputs have been read when their staging is written.
    staging = slot.values.data();
    for (const ValueIndex v : stages_[slot.next_stage + 1].span.inputs) {
      const int64_t bytes = bytes_of(v, slot);
      stream_->download(staging, buffers_[1].value(v), bytes);
      staging += bytes;
    }
  } else if (const int64_t bytes = bytes_of(plan_.logits, slot); bytes > 0) {
    stream_->download(slot.logits.data(), buffers_[1].value(plan_.logits), bytes);
  }
  stream_->record(*slot.done);
}

void Pipeline::run_to_end(Slot& slot) {
  try {
    while (slot.awaited || slot.next_stage < stages_.size()) {
      if (slot.awaited) slot.done->synchronize();
      slot.awaited = false;
      advance(slot);
    }
  } catch (const Error& error) {
    failure_ = error.what();
    slot.awaited = false;
    slot.next_stage = stages_.size();
    throw;
  }
}

std::span<const float> Pipeline::collect() {
  Slot& slot = oldest();
  --in_flight_;
  run_to_end(slot);
  const auto count = slot.rows.output_rows.size() * static_cast<size_t>(plan_.vocab_size);
  if (stages_.back().span.on_accelerator) {
    return {reinterpret_cast<const float*>(slot.logits.data()), count};
  }
  if (!slot.kept.empty()) return slot.kept;
  return {cpu::host_pointer<const float>(buffers_[0].value(plan_.logits)), count};
}

void Pipeline::finish() {
  for (int64_t i = in_flight_; i > 0; --i) {
    Slot& slot = slots_[(next_ + slots_.size() - static_cast<size_t>(i)) % slots_.size()];
    if (!slot.awaited && slot.next_stage == stages_.size()) continue;
    run_to_end(slot);
    if (stages_.back().span.on_accelerator) continue;
    const auto* logits = cpu::host_pointer<const float>(buffers_[0].value(plan_.logits));
    slot.kept.assign(logits,
                     logits + slot.rows.output_rows.size() * static_cast<size_t>(plan_.vocab_size));
  }
}

}  // namespace helm
