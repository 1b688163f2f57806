// The engine: sequences over the KV pool, and steps over the compiled stages.
#include "helm/engine.h"

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <variant>

#include "base/check.h"
#include "base/thread_pool.h"
#include "cpu/isa.h"
#include "cpu/stage.h"
#include "engine/kv_pool.h"
#include "engine/weights.h"

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Weight bytes that a step of one token reads.
int64_t decode_bytes(const Plan& plan) {
  int64_t bytes = 0;
  const auto visit = [&](const auto& op) {
    if constexpr (std::is_same_v<std::decay_t<decltype(op)>, LinearOp>) {
      for (const LinearOp::Part& part : op.parts) {
        bytes += plan.tensors[static_cast<size_t>(part.weight)].bytes();
      }
    }
  };
  for (const UnitSpec& unit : plan.units) {
    for (const Op& op : unit.ops) std::visit(visit, op);
  }
  return bytes;
}

}  // namespace

class Engine::Impl {
 public:
  Impl(Plan plan, const EngineOptions& options)
      : plan_(std::move(plan)),
        kernels_(cpu::select_kernels()),
        threads_(options.threads > 0 ? options.threads : plan_.threads),
        start_(Clock::now()),
        weights_(plan_, options, kernels_, threads_),
        kv_(plan_.kv),
        stage_(plan_, plan_.units, weights_.data(), {kv_.base(), plan_.kv}, kernels_,
               threads_.size()),
        load_s_(seconds_since(start_)) {
    const auto tokens = static_cast<size_t>(plan_.limits.step_tokens);
    token_ids_.reserve(tokens);
    positions_.reserve(tokens);
    output_rows_.reserve(static_cast<size_t>(plan_.limits.step_outputs));
    runs_.reserve(tokens);
  }

  const Plan& plan() const { return plan_; }
  EngineStats stats() const;
  bool can_open(int64_t capacity) const;
  SequenceId open(int64_t capacity);
  void close(SequenceId id);
  int64_t length(SequenceId id) const { return sequence(id).length; }
  int64_t capacity(SequenceId id) const { return sequence(id).capacity; }
  void truncate(SequenceId id, int64_t length);
  std::span<const float> step(std::span<const StepInput> inputs);

 private:
  const KvSequence& sequence(SequenceId id) const;
  KvSequence& sequence(SequenceId id) {
    return const_cast<KvSequence&>(static_cast<const Impl*>(this)->sequence(id));
  }
  void check(std::span<const StepInput> inputs) const;
  void check_tokens(const StepInput& input) const;
  void gather(std::span<const StepInput> inputs);

  Plan plan_;
  const cpu::KernelTable& kernels_;
  ThreadPool threads_;
  Clock::time_point start_;
  Weights weights_;
  KvPool kv_;
  cpu::CpuStage stage_;
  double load_s_;

  std::map<SequenceId, KvSequence> sequences_;
  SequenceId next_id_ = 0;

  // One step's inputs, reused from step to step.
  std::vector<int32_t> token_ids_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> output_rows_;
  std::vector<cpu::SequenceRun> runs_;
};

EngineStats Engine::Impl::stats() const {
  EngineStats stats;
  stats.weights_bytes = weights_.bytes();
  stats.decode_bytes = decode_bytes(plan_);
  stats.kv_bytes = kv_.bytes();
  stats.kv_token_bytes = plan_.kv.page_bytes() / plan_.kv.page_tokens * plan_.kv.layers;
  stats.activations_bytes = stage_.activations_bytes();
  stats.workspace_bytes = stage_.workspace_bytes();
  stats.threads = threads_.size();
  stats.isa = kernels_.name;
  stats.huge_pages = weights_.huge_pages();
  stats.load_s = load_s_;
  return stats;
}

const KvSequence& Engine::Impl::sequence(SequenceId id) const {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) fail(ErrorKind::kInvalid, "[engine] sequence ", id, " is not open");
  return it->second;
}

bool Engine::Impl::can_open(int64_t capacity) const {
  return static_cast<int64_t>(sequences_.size()) < plan_.limits.sequences &&
         kv_.pages_for(capacity) <= kv_.unreserved();
}

SequenceId Engine::Impl::open(int64_t capacity) {
  if (capacity < 1 || capacity > plan_.limits.context) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity,
         " positions was asked for, the plan's context is ", plan_.limits.context,
         "; raise --context or shorten the prompt");
  }
  if (static_cast<int64_t>(sequences_.size()) >= plan_.limits.sequences) {
    fail(ErrorKind::kCapacity, "[engine] ", sequences_.size(),
         " sequences are open, the plan's limit; close one or raise max_sequences");
  }
  if (!can_open(capacity)) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity, " positions needs ",
         kv_.pages_for(capacity), " KV pages, ", kv_.unreserved(), " of ", plan_.kv.pages,
         " are free; close a sequence or lower --context");
  }
  KvSequence sequence;
  sequence.capacity = capacity;
  sequence.pages.reserve(static_cast<size_t>(kv_.pages_for(capacity)));
  kv_.reserve(kv_.pages_for(capacity));
  sequences_.emplace(next_id_, std::move(sequence));
  return next_id_++;
}

void Engine::Impl::close(SequenceId id) {
  truncate(id, 0);
  kv_.unreserve(kv_.pages_for(sequence(id).capacity));
  sequences_.erase(id);
}

void Engine::Impl::truncate(SequenceId id, int64_t length) {
  KvSequence& kept = sequence(id);
  if (length < 0 || length > kept.length) {
    fail(ErrorKind::kInvalid, "[engine] cannot truncate sequence ", id, " of ", kept.length,
         " positions to ", length);
  }
  kept.length = length;
  while (static_cast<int64_t>(kept.pages.size()) > kv_.pages_for(length)) {
    kv_.give_back(kept.pages.back());
    kept.pages.pop_back();
  }
}

void Engine::Impl::check_tokens(const StepInput& input) const {
  const KvSequence& target = sequence(input.sequence);
  const auto count = static_cast<int64_t>(input.tokens.size());
  if (count == 0)
    fail(ErrorKind::kInvalid, "[engine] no tokens given for sequence ", input.sequence);
  if (target.length + count > target.capacity) {
    fail(ErrorKind::kCapacity, "[engine] sequence ", input.sequence, " holds ", target.length,
         " positions and was opened for ", target.capacity, ", ", count, " more do not fit");
  }
  for (size_t i = 0; i < input.tokens.size(); ++i) {
    if (input.tokens[i] < 0 || input.tokens[i] >= plan_.vocab_size) {
      fail(ErrorKind::kInvalid, "[engine] token ", i, " is ", input.tokens[i],
           ", outside the vocabulary of ", plan_.vocab_size);
    }
  }
}

void Engine::Impl::check(std::span<const StepInput> inputs) const {
  int64_t tokens = 0;
  int64_t outputs = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tokens(inputs[i]);
    for (size_t j = 0; j < i; ++j) {
      if (inputs[i].sequence == inputs[j].sequence) {
        fail(ErrorKind::kInvalid, "[engine] sequence ", inputs[i].sequence,
             " appears twice in a step");
      }
    }
    const auto count = static_cast<int64_t>(inputs[i].tokens.size());
    tokens += count;
    if (inputs[i].outputs == StepInput::Outputs::kLast) outputs += 1;
    if (inputs[i].outputs == StepInput::Outputs::kAll) outputs += count;
  }
  if (tokens == 0 || tokens > plan_.limits.step_tokens || outputs > plan_.limits.step_outputs) {
    fail(ErrorKind::kCapacity, "[engine] a step of ", tokens, " tokens and ", outputs,
         " outputs was asked for, the plan allows 1 to ", plan_.limits.step_tokens, " and ",
         plan_.limits.step_outputs);
  }
}

// Lays the inputs out as rows and gives every new position its page.
void Engine::Impl::gather(std::span<const StepInput> inputs) {
  token_ids_.clear();
  positions_.clear();
  output_rows_.clear();
  runs_.clear();
  for (const StepInput& input : inputs) {
    KvSequence& target = sequence(input.sequence);
    const auto first_row = static_cast<int64_t>(token_ids_.size());
    const auto count = static_cast<int64_t>(input.tokens.size());
    while (static_cast<int64_t>(target.pages.size()) < kv_.pages_for(target.length + count)) {
      target.pages.push_back(kv_.take());
    }
    for (int64_t i = 0; i < count; ++i) {
      token_ids_.push_back(input.tokens[static_cast<size_t>(i)]);
      positions_.push_back(static_cast<int32_t>(target.length + i));
      const bool last = input.outputs == StepInput::Outputs::kLast && i == count - 1;
      if (last || input.outputs == StepInput::Outputs::kAll) {
        output_rows_.push_back(static_cast<int32_t>(first_row + i));
      }
    }
    runs_.push_back({first_row, count, target.length, target.pages.data()});
  }
}

std::span<const float> Engine::Impl::step(std::span<const StepInput> inputs) {
  check(inputs);
  gather(inputs);
  stage_.run({token_ids_, positions_, output_rows_, runs_}, threads_);
  for (const StepInput& input : inputs) {
    sequence(input.sequence).length += static_cast<int64_t>(input.tokens.size());
  }
  return {stage_.value(plan_.logits), output_rows_.size() * static_cast<size_t>(plan_.vocab_size)};
}

Engine::Engine(Plan plan, EngineOptions options)
    : impl_(std::make_unique<Impl>(std::move(plan), options)) {}
Engine::~Engine() = default;

const Plan& Engine::plan() const {
  return impl_->plan();
}
EngineStats Engine::stats() const {
  return impl_->stats();
}
bool Engine::can_open(int64_t capacity) const {
  return impl_->can_open(capacity);
}
SequenceId Engine::open(int64_t capacity) {
  return impl_->open(capacity);
}
void Engine::close(SequenceId sequence) {
  impl_->close(sequence);
}
int64_t Engine::capacity(SequenceId sequence) const {
  return impl_->capacity(sequence);
}
int64_t Engine::length(SequenceId sequence) const {
  return impl_->length(sequence);
}
void Engine::truncate(SequenceId sequence, int64_t length) {
  impl_->truncate(sequence, length);
}
std::span<const float> Engine::step(std::span<const StepInput> inputs) {
  return impl_->step(inputs);
}

void Engine::forward(SequenceId sequence, std::span<const int32_t> tokens,
                     StepInput::Outputs outputs,
                     const std::function<void(std::span<const float>)>& consume) {
  if (tokens.empty()) fail(ErrorKind::kInvalid, "[engine] no tokens given to forward");
  const Limits& limits = plan().limits;
  const bool all = outputs == StepInput::Outputs::kAll;
  const auto chunk = static_cast<size_t>(all ? limits.step_outputs : limits.step_tokens);
  for (size_t begin = 0; begin < tokens.size(); begin += chunk) {
    const size_t count = std::min(chunk, tokens.size() - begin);
    const bool last = begin + count == tokens.size();
    const StepInput input{sequence, tokens.subspan(begin, count),
                          all || last ? outputs : StepInput::Outputs::kNone};
    const std::span<const float> logits = step({&input, 1});
    if (!logits.empty()) consume(logits);
  }
}

}  // namespace helm
