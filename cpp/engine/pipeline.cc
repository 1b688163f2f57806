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

DeviceBuffers::DeviceBuffers(const Plan& plan, const std::vector<bool>& chosen,
                             std::span<const ValueIndex> more,
                             std::span<const StageSpan> device_stages, int64_t kv_pages,
                             Account& account) {
  std::vector<bool> used = values_of(plan, chosen);
  for (const ValueIndex v : more) used[static_cast<size_t>(v)] = true;
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
  for (const StageSpan& stage : device_stages) {
    scratch = std::max(scratch, account.device().workspace_bytes(plan, stage.units(plan)));
  }
  kv_ = DeviceMemory(account, kv_pages * plan.kv.page_bytes(), "the KV cache");
  activations_ = DeviceMemory(account, total, "activations");
  workspace_ = DeviceMemory(account, scratch, "the workspace");
  values_.assign(plan.values.size(), DeviceAddress::kNull);
  for (size_t v = 0; v < used.size(); ++v) {
    if (used[v]) values_[v] = activations_.address() + offsets[v];
  }
}

StageSpec DeviceBuffers::spec(const Plan& plan) const {
  StageSpec spec;
  spec.plan = &plan;
  spec.values = values_;
  spec.kv = kv();
  spec.workspace = workspace();
  return spec;
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
  pages.clear();
  far.blocks.clear();
  far.pages.clear();
}

Plan Pipeline::extended(const Plan& plan, const KvCache& kv) {
  return kv.overflows() ? KvOverflow::with_partials(plan) : plan;
}

Pipeline::Pipeline(const Plan& plan, const Weights& weights, KvCache& kv, Account& cpu,
                   Account* accelerator)
    : plan_(extended(plan, kv)),
      kv_(kv),
      accelerator_(accelerator == nullptr ? nullptr : &accelerator->device()),
      cpu_stream_(cpu.device().create_stream()) {
  const std::vector<bool> resident = resident_units(plan_);
  std::vector<bool> on_cpu = resident;
  on_cpu.flip();
  const bool visiting = plan.schedule.stream_tokens > 0;
  const auto visits = [](const Compiled& stage) {
    return std::any_of(stage.parts.begin(), stage.parts.end(),
                       [](const Part& part) { return part.stage == nullptr; });
  };
  const std::vector<bool> there = visiting ? visiting_units(plan_) : resident;
  buffers_[0] = DeviceBuffers(plan_, on_cpu, {}, stages_on(stages_of(plan_, resident), false),
                              kv.cpu_pages(), cpu);
  if (accelerator != nullptr) {
    std::vector<ValueIndex> partials;
    if (kv.overflows()) partials = KvOverflow::partials(plan_);
    stream_ = accelerator_->create_stream();
    buffers_[1] = DeviceBuffers(plan_, there, partials, stages_on(stages_of(plan_, there), true),
                                kv.near_pages(), *accelerator);
  }
  resident_ = compile(resident, weights, cpu, accelerator);
  if (visiting) {
    visiting_ = compile(there, weights, cpu, accelerator);
    if (std::count_if(visiting_.begin(), visiting_.end(), visits) > 1) {
      fail(ErrorKind::kInvalid,
           "[plan] blocks whose weights visit the accelerator must follow one "
           "another there; set schedule.prefill to \"compute\"");
    }
    blocks_ = std::make_unique<BlockVisits>(
        plan_, weights, buffers_[1].spec(plan_),
        std::span(cpu::host_pointer(buffers_[0].kv()), static_cast<size_t>(buffers_[0].kv_bytes())),
        *accelerator);
  }
  if (kv.overflows()) {
    StageSpec bound = buffers_[1].spec(plan_);
    bound.weights = weights.on_accelerator();
    overflow_ = std::make_unique<KvOverflow>(plan_, kv, bound, cpu, *accelerator);
  }
  create_slots(cpu);
}

Pipeline::~Pipeline() = default;

Pipeline::Program Pipeline::compile(const std::vector<bool>& on_accelerator, const Weights& weights,
                                    Account& cpu, Account* accelerator) {
  const std::vector<bool> resident = resident_units(plan_);
  Program program;
  for (const StageSpan& span : stages_of(plan_, on_accelerator)) {
    Compiled stage{span, {}};
    Account& account = span.on_accelerator ? *accelerator : cpu;
    StageSpec spec = buffers_[span.on_accelerator].spec(plan_);
    spec.weights = span.on_accelerator ? weights.on_accelerator() : weights.on_cpu();
    for (size_t begin = span.begin; begin < span.end;) {
      size_t end = begin + 1;
      if (resident[begin] != span.on_accelerator) {
        stage.parts.push_back({nullptr, begin, end});
      } else {
        while (end < span.end && resident[end] == span.on_accelerator) ++end;
        spec.units = std::span(plan_.units).subspan(begin, end - begin);
        stage.parts.push_back({account.device().compile(spec), begin, end});
      }
      begin = end;
    }
    program.push_back(std::move(stage));
  }
  return program;
}

int64_t Pipeline::crossings() const {
  return static_cast<int64_t>(resident_.size()) - 1;
}

void Pipeline::create_slots(Account& cpu) {
  int64_t values = 0;
  for (const Program* program : {&resident_, &visiting_}) {
    for (const Compiled& stage : *program) {
      int64_t bytes = 0;
      for (const ValueIndex v : stage.span.inputs) {
        bytes += value_bytes(plan_, v, plan_.limits.step_tokens, plan_.limits.step_outputs);
      }
      values = std::max(values, bytes);
    }
  }
  for (Slot& slot : slots_) {
    slot.rows.reserve(plan_.limits);
    if (accelerator_ == nullptr) continue;
    if (values > 0)
      slot.values = StagingMemory(cpu, *accelerator_, values, "activations that cross");
    if (resident_.back().span.on_accelerator) {
      const int64_t bytes = value_bytes(plan_, plan_.logits, 0, plan_.limits.step_outputs);
      slot.logits = StagingMemory(cpu, *accelerator_, bytes, "logits");
    }
    slot.done = accelerator_->create_event();
  }
}

int64_t Pipeline::staging_bytes() const {
  int64_t bytes = overflow_ == nullptr ? 0 : overflow_->staging_bytes();
  for (const Slot& slot : slots_) bytes += slot.values.bytes() + slot.logits.bytes();
  return bytes;
}

int64_t Pipeline::bytes_of(ValueIndex value, const Slot& slot) const {
  const StepView step = slot.rows.view();
  return value_bytes(plan_, value, step.tokens(), step.outputs());
}

void Pipeline::make_room(int64_t blocks, std::span<const int32_t> recalled) {
  if (overflow_ == nullptr) return;
  // Stages that are not enqueued yet would look for pages that have left.
  const auto late = [](const Program& program) {
    return std::count_if(program.begin(), program.end(),
                         [](const Compiled& stage) { return stage.span.on_accelerator; }) > 1;
  };
  if (in_flight_ > 0 && (late(resident_) || late(visiting_))) finish();
  check_devices();
  for (const int32_t block : recalled) overflow_->recall(block, *stream_);
  overflow_->make_room(blocks, *stream_);
}

// Calls move(layer, host memory of the page or null, its address on the accelerator).
template <typename Move>
void Pipeline::each_page(const KvBlock& block, const Move& move) {
  const int64_t page_bytes = plan_.kv.page_bytes();
  std::vector<int32_t> pages;
  const bool far = block.far != KvBlock::kNone;
  kv_.append_pages(block, false, pages);
  for (size_t layer = 0; layer < pages.size(); ++layer) {
    if (!kv_.near_layer(layer)) {
      move(layer, cpu::host_pointer(buffers_[0].kv()) + pages[layer] * page_bytes,
           DeviceAddress::kNull);
    } else if (far) {
      move(layer,
           overflow_->far_slot(block.far) +
               kv_.near_ordinal(static_cast<int64_t>(layer)) * page_bytes,
           DeviceAddress::kNull);
    } else {
      move(layer, nullptr, buffers_[1].kv() + pages[layer] * page_bytes);
    }
  }
}

void Pipeline::settle_copies() {
  finish();
  check_devices();
  if (stream_ != nullptr) stream_->synchronize();
  if (overflow_ != nullptr) overflow_->synchronize();
}

void Pipeline::read_block(const KvBlock& block, std::byte* to) {
  settle_copies();
  const int64_t bytes = plan_.kv.page_bytes();
  each_page(block, [&](size_t layer, const std::byte* host, DeviceAddress address) {
    std::byte* page = to + static_cast<int64_t>(layer) * bytes;
    if (host != nullptr) {
      std::memcpy(page, host, static_cast<size_t>(bytes));
    } else {
      stream_->download(page, address, bytes);
    }
  });
  if (stream_ != nullptr) stream_->synchronize();
}

void Pipeline::write_block(const KvBlock& block, const std::byte* from) {
  settle_copies();
  const int64_t bytes = plan_.kv.page_bytes();
  each_page(block, [&](size_t layer, std::byte* host, DeviceAddress address) {
    const std::byte* page = from + static_cast<int64_t>(layer) * bytes;
    if (host != nullptr) {
      std::memcpy(host, page, static_cast<size_t>(bytes));
    } else {
      stream_->upload(address, page, bytes);
    }
  });
  if (stream_ != nullptr) stream_->synchronize();
}

void Pipeline::check_devices() const {
  if (failure_.empty()) return;
  fail(ErrorKind::kDevice, "[engine] a device has failed (", failure_, "); load the model anew");
}

void Pipeline::submit() {
  Slot& slot = slots_[next_];
  const Program& program = program_for(slot.rows.view());
  // Pages in host memory are the CPU's or the accelerator's to write, not both at once.
  if (in_flight_ > 0 && (oldest().program != &program || oldest().ended())) finish();
  check_devices();
  slot.program = &program;
  slot.rows.number = next_step_number();
  slot.next_stage = 0;
  slot.kept.clear();
  try {
    advance(slot);
  } catch (const Error& error) {
    failure_ = error.what();
    throw;
  }
  next_ = (next_ + 1) % slots_.size();
  ++in_flight_;
}

const Pipeline::Program& Pipeline::program_for(const StepView& step) const {
  const bool visiting =
      blocks_ != nullptr && step.tokens() >= plan_.schedule.stream_tokens && blocks_->holds(step);
  return visiting ? visiting_ : resident_;
}

// Runs stages up to and including the next one on the accelerator, which is only enqueued.
void Pipeline::advance(Slot& slot) {
  while (slot.next_stage < slot.program->size()) {
    const Compiled& stage = (*slot.program)[slot.next_stage];
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
    for (const Part& part : stage.parts) part.stage->run(*cpu_stream_, slot.rows.view());
    ++slot.next_stage;
  }
}

// Hands the stage its inputs, enqueues it, and asks for what the stage after it or the caller
// needs.
void Pipeline::run_on_accelerator(const Compiled& stage, Slot& slot) {
  std::byte* staging = slot.values.data();
  for (const ValueIndex v : stage.span.inputs) {
    const int64_t bytes = bytes_of(v, slot);
    if (bytes == 0) continue;
    std::memcpy(staging, cpu::host_pointer(buffers_[0].value(v)), static_cast<size_t>(bytes));
    stream_->upload(buffers_[1].value(v), staging, bytes);
    staging += bytes;
  }
  const bool visiting = slot.program == &visiting_;
  if (visiting) ++visiting_steps_;
  const StepView step = visiting ? blocks_->begin(slot.rows.view()) : slot.rows.view();
  for (const Part& part : stage.parts) {
    if (part.stage == nullptr) {
      blocks_->run(part.begin, step, *stream_);
    } else if (slot.rows.far.any()) {
      overflow_->run(part.begin, part.end, step, slot.rows.far, *stream_);
    } else {
      part.stage->run(*stream_, step);
    }
  }
  if (slot.next_stage + 1 < slot.program->size()) {
    // In stream order the inputs have been read when their staging is written.
    staging = slot.values.data();
    for (const ValueIndex v : (*slot.program)[slot.next_stage + 1].span.inputs) {
      const int64_t bytes = bytes_of(v, slot);
      if (bytes == 0) continue;
      stream_->download(staging, buffers_[1].value(v), bytes);
      staging += bytes;
    }
  } else if (const int64_t bytes = bytes_of(plan_.logits, slot); bytes > 0) {
    stream_->download(slot.logits.data(), buffers_[1].value(plan_.logits), bytes);
  }
  stream_->record(*slot.done);
}

// A failure ends this step and all others.
void Pipeline::run_to_end(Slot& slot) {
  try {
    while (failure_.empty() && !slot.ended()) {
      if (slot.awaited) slot.done->synchronize();
      slot.awaited = false;
      advance(slot);
    }
  } catch (const Error& error) {
    failure_ = error.what();
  }
}

std::span<const float> Pipeline::collect() {
  Slot& slot = oldest();
  --in_flight_;
  run_to_end(slot);
  check_devices();
  const auto count = slot.rows.output_rows.size() * static_cast<size_t>(plan_.vocab_size);
  if (resident_.back().span.on_accelerator) {
    return {reinterpret_cast<const float*>(slot.logits.data()), count};
  }
  if (!slot.kept.empty()) return slot.kept;
  return {cpu::host_pointer<const float>(buffers_[0].value(plan_.logits)), count};
}

void Pipeline::finish() {
  for (int64_t i = in_flight_; i > 0; --i) {
    Slot& slot = slots_[(next_ + slots_.size() - static_cast<size_t>(i)) % slots_.size()];
    run_to_end(slot);
    if (failure_.empty()) keep_logits(slot);
  }
}

// Another step is about to overwrite the CPU's logits.
void Pipeline::keep_logits(Slot& slot) {
  if (resident_.back().span.on_accelerator || !slot.kept.empty()) return;
  const auto* logits = cpu::host_pointer<const float>(buffers_[0].value(plan_.logits));
  slot.kept.assign(logits,
                   logits + slot.rows.output_rows.size() * static_cast<size_t>(plan_.vocab_size));
}

}  // namespace helm
