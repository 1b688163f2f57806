// The engine: sequences over the KV pool, and steps over the compiled stages.
#include "helm/engine.h"

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <variant>

#include "base/check.h"
#include "base/thread_pool.h"
#include "cpu/cpu_device.h"
#include "cpu/isa.h"
#include "device/registry.h"
#include "engine/kv_cache.h"
#include "engine/kv_file.h"
#include "engine/pipeline.h"
#include "engine/weights.h"
#include "engine/weights_digest.h"

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
        cpu_(kernels_, threads_),
        cpu_account_(cpu_, kUnlimited),
        accelerator_(plan_.uses_accelerator() ? open_accelerator(options.device) : nullptr),
        accelerator_account_(
            accelerator_ ? std::make_unique<Account>(*accelerator_, plan_.accelerator_memory_bytes)
                         : nullptr),
        weights_(plan_, options, kernels_, threads_, accelerator_account_.get()),
        kv_(plan_, accelerator_layers(plan_)),
        pipeline_(plan_, weights_, kv_, cpu_account_, accelerator_account_.get()),
        load_s_(seconds_since(start_)) {
    check_pools();
  }

  const Plan& plan() const { return plan_; }
  EngineStats stats() const;
  bool can_open(int64_t capacity, int64_t shared) const;
  SequenceId open(int64_t capacity);
  SequenceId fork(SequenceId source, int64_t length, int64_t capacity);
  void check_open(int64_t capacity, int64_t blocks) const;
  void save(SequenceId id, std::span<const int32_t> tokens, const std::string& path,
            const std::string& metadata, const Progress& progress);
  LoadedSequence load(const std::string& path, int64_t capacity, const Progress& progress);
  void close(SequenceId id);
  int64_t length(SequenceId id) const { return sequence(id).length; }
  int64_t capacity(SequenceId id) const { return sequence(id).capacity; }
  void resize(SequenceId id, int64_t length, int64_t capacity);
  bool can_resize(SequenceId id, int64_t length, int64_t capacity) const;
  int64_t steps_ahead() const { return pipeline_.limit(); }
  int64_t in_flight() const { return pipeline_.in_flight(); }
  std::span<const float> step(std::span<const StepInput> inputs);
  void submit(std::span<const StepInput> inputs, StepOwner* owner);
  std::span<const float> collect();

 private:
  static constexpr int64_t kUnlimited = int64_t{1} << 62;

  const KvSequence& sequence(SequenceId id) const;
  KvSequence& sequence(SequenceId id) {
    return const_cast<KvSequence&>(static_cast<const Impl*>(this)->sequence(id));
  }
  void check(std::span<const StepInput> inputs) const;
  void check_tokens(const StepInput& input) const;
  void make_room(std::span<const StepInput> inputs);
  void copy_last(KvSequence& target);
  void gather(std::span<const StepInput> inputs, StepRows& rows);
  void check_pools() const;
  void make_way(StepOwner* owner);
  DeviceUse use_of(bool accelerator) const;
  const std::string& weights_digest();

  Plan plan_;
  const cpu::KernelTable& kernels_;
  ThreadPool threads_;
  Clock::time_point start_;
  cpu::CpuDevice cpu_;
  Account cpu_account_;
  std::unique_ptr<Device> accelerator_;  // null for a plan without one
  std::unique_ptr<Account> accelerator_account_;
  Weights weights_;
  KvCache kv_;
  Pipeline pipeline_;
  double load_s_;

  std::map<SequenceId, KvSequence> sequences_;
  SequenceId next_id_ = 0;
  StepOwner* owner_ = nullptr;  // of the steps that are on their way
  std::string weights_digest_;  // made when first asked for
};

DeviceUse Engine::Impl::use_of(bool accelerator) const {
  const Account& account = accelerator ? *accelerator_account_ : cpu_account_;
  const DeviceInfo info = account.device().describe();
  const DeviceBuffers& buffers = pipeline_.buffers(accelerator);
  DeviceUse use;
  use.device = accelerator ? "accelerator" : "cpu";
  use.kind = info.kind;
  use.name = info.name;
  use.weights_bytes = accelerator ? weights_.accelerator_bytes() : weights_.cpu_bytes();
  use.kv_bytes = buffers.kv_bytes() + (accelerator ? 0 : pipeline_.far_bytes());
  use.activations_bytes = buffers.activations_bytes();
  use.workspace_bytes = buffers.workspace_bytes();
  use.staging_bytes = accelerator ? pipeline_.visiting_bytes() : pipeline_.staging_bytes();
  use.peak_bytes = account.peak_bytes();
  if (!accelerator) {
    use.peak_bytes += use.weights_bytes + use.staging_bytes + pipeline_.far_bytes();
  }
  use.budget_bytes = accelerator ? plan_.accelerator_memory_bytes : 0;
  return use;
}

EngineStats Engine::Impl::stats() const {
  EngineStats stats;
  stats.devices.push_back(use_of(false));
  if (accelerator_) stats.devices.push_back(use_of(true));
  for (const DeviceUse& use : stats.devices) {
    stats.weights_bytes += use.weights_bytes;
    stats.kv_bytes += use.kv_bytes;
    stats.activations_bytes += use.activations_bytes;
    stats.workspace_bytes += use.workspace_bytes;
  }
  stats.decode_bytes = decode_bytes(plan_);
  stats.kv_token_bytes = plan_.kv.page_bytes() / plan_.kv.page_tokens * plan_.kv.layers;
  stats.crossings = pipeline_.crossings();
  stats.streamed_steps = pipeline_.streamed_steps();
  if (const KvOverflow* overflow = pipeline_.overflow()) {
    stats.evicted_blocks = overflow->evicted_blocks();
    stats.cpu_attentions = overflow->cpu_attentions();
    stats.page_visits = overflow->page_visits();
  }
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

bool Engine::Impl::can_open(int64_t capacity, int64_t shared) const {
  return static_cast<int64_t>(sequences_.size()) < plan_.limits.sequences &&
         kv_.blocks_to_fork(shared, capacity) <= kv_.unreserved();
}

void Engine::Impl::check_open(int64_t capacity, int64_t blocks) const {
  if (capacity < 1 || capacity > plan_.limits.context) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity,
         " positions was asked for, the plan's context is ", plan_.limits.context,
         "; raise --context or shorten the prompt");
  }
  if (static_cast<int64_t>(sequences_.size()) >= plan_.limits.sequences) {
    fail(ErrorKind::kCapacity, "[engine] ", sequences_.size(),
         " sequences are open, the plan's limit; close one or raise max_sequences");
  }
  if (blocks > kv_.unreserved()) {
    fail(ErrorKind::kCapacity, "[engine] a sequence of ", capacity, " positions needs ", blocks,
         " blocks of KV pages, ", kv_.unreserved(), " of ", kv_.blocks(),
         " are free; close a sequence, lower --context or give the KV cache more memory");
  }
}

SequenceId Engine::Impl::open(int64_t capacity) {
  check_open(capacity, kv_.blocks_for(capacity));
  sequences_.emplace(next_id_, kv_.open(capacity));
  return next_id_++;
}

SequenceId Engine::Impl::fork(SequenceId source, int64_t length, int64_t capacity) {
  const KvSequence& from = sequence(source);
  if (length < 0 || length > from.length || length > capacity) {
    fail(ErrorKind::kInvalid, "[engine] cannot begin a sequence of ", capacity,
         " positions with the first ", length, " of the ", from.length, " of sequence ", source);
  }
  check_open(capacity, kv_.blocks_to_fork(length, capacity));
  sequences_.emplace(next_id_, kv_.fork(from, length, capacity));
  return next_id_++;
}

void Engine::Impl::close(SequenceId id) {
  KvSequence& closed = sequence(id);
  pipeline_.finish();
  kv_.close(closed);
  sequences_.erase(id);
}

const std::string& Engine::Impl::weights_digest() {
  if (weights_digest_.empty()) {
    weights_digest_ = helm::weights_digest(plan_, weights_, accelerator_.get());
  }
  return weights_digest_;
}

void Engine::Impl::save(SequenceId id, std::span<const int32_t> tokens, const std::string& path,
                        const std::string& metadata, const Progress& progress) {
  const KvSequence& saved = sequence(id);
  if (static_cast<int64_t>(tokens.size()) > saved.length) {
    fail(ErrorKind::kInvalid, "[kv] ", tokens.size(), " tokens were given for the ", saved.length,
         " positions of sequence ", id);
  }
  const KvFileHeader header{
      plan_.fingerprint, weights_digest(), plan_.kv, {tokens.begin(), tokens.end()}, metadata};
  KvFileWriter writer(path, header);
  std::vector<std::byte> content(static_cast<size_t>(header.block_bytes()));
  for (int64_t b = 0; b < header.blocks(); ++b) {
    pipeline_.read_block(kv_.block(saved.blocks[static_cast<size_t>(b)]), content.data());
    writer.append(content);
    if (progress) progress((b + 1) * header.block_bytes(), header.blocks() * header.block_bytes());
  }
  writer.finish();
}

LoadedSequence Engine::Impl::load(const std::string& path, int64_t capacity,
                                  const Progress& progress) {
  KvFileReader reader(path, plan_, weights_digest());
  const KvFileHeader& header = reader.header();
  const auto length = static_cast<int64_t>(header.tokens.size());
  const SequenceId id = open(std::max(capacity, length));
  try {
    KvSequence& loaded = sequence(id);
    std::vector<std::byte> content;
    for (int64_t b = 0; b < header.blocks(); ++b) {
      const int64_t end = std::min(length, (b + 1) * plan_.kv.page_tokens);
      pipeline_.make_room(1);
      reader.read(content);
      kv_.extend(loaded, end);
      pipeline_.write_block(kv_.block(loaded.blocks.back()), content.data());
      kv_.grown(loaded, end);
      if (progress)
        progress((b + 1) * header.block_bytes(), header.blocks() * header.block_bytes());
    }
  } catch (...) {
    close(id);
    throw;
  }
  return {id, header.tokens, header.metadata};
}

bool Engine::Impl::can_resize(SequenceId id, int64_t length, int64_t capacity) const {
  return kv_.blocks_to_resize(sequence(id), length, capacity) <= kv_.unreserved();
}

void Engine::Impl::resize(SequenceId id, int64_t length, int64_t capacity) {
  KvSequence& kept = sequence(id);
  if (length < 0 || length > kept.length) {
    fail(ErrorKind::kInvalid, "[engine] cannot truncate sequence ", id, " of ", kept.length,
         " positions to ", length);
  }
  if (capacity < std::max<int64_t>(length, 1) || capacity > plan_.limits.context) {
    fail(ErrorKind::kInvalid, "[engine] cannot give sequence ", id, " of ", length, " positions ",
         capacity, " of the context's ", plan_.limits.context);
  }
  if (!can_resize(id, length, capacity)) {
    fail(ErrorKind::kCapacity, "[engine] cutting sequence ", id, " back to ", length,
         " positions of ", capacity, " needs ", kv_.blocks_to_resize(kept, length, capacity),
         " more blocks of KV pages, ", kv_.unreserved(), " of ", kv_.blocks(),
         " are free; close a sequence, most of all one that shares its positions");
  }
  pipeline_.finish();
  kv_.resize(kept, length, capacity);
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

// Makes room on the accelerator for the blocks that the step adds or writes to, and makes those it
// writes to its own.
void Engine::Impl::make_room(std::span<const StepInput> inputs) {
  int64_t added = 0;
  for (const StepInput& input : inputs) {
    const KvSequence& target = sequence(input.sequence);
    added += kv_.blocks_for(target.length + static_cast<int64_t>(input.tokens.size())) -
             static_cast<int64_t>(target.blocks.size());
    if (kv_.shares_last(target)) {
      ++added;
    } else {
      kv_.keep_last_near(target);
      added += kv_.last_is_far(target);
    }
  }
  pipeline_.make_room(added);
  for (const StepInput& input : inputs) {
    KvSequence& target = sequence(input.sequence);
    if (kv_.shares_last(target)) {
      copy_last(target);
    } else if (kv_.last_is_far(target)) {
      pipeline_.recall(target.blocks.back());
    }
  }
}

// Copy on write: the sequence goes on in a block of its own.
void Engine::Impl::copy_last(KvSequence& target) {
  std::vector<std::byte> content(static_cast<size_t>(plan_.kv.layers * plan_.kv.page_bytes()));
  pipeline_.read_block(kv_.block(target.blocks.back()), content.data());
  kv_.own_last(target);
  pipeline_.write_block(kv_.block(target.blocks.back()), content.data());
}

// Lays the inputs out as rows and gives every new position its page.
void Engine::Impl::gather(std::span<const StepInput> inputs, StepRows& rows) {
  rows.clear();
  for (const StepInput& input : inputs) {
    KvSequence& target = sequence(input.sequence);
    const auto first_row = static_cast<int64_t>(rows.token_ids.size());
    const auto count = static_cast<int64_t>(input.tokens.size());
    kv_.extend(target, target.length + count);
    for (int64_t i = 0; i < count; ++i) {
      rows.token_ids.push_back(input.tokens[static_cast<size_t>(i)]);
      rows.positions.push_back(static_cast<int32_t>(target.length + i));
      const bool last = input.outputs == StepInput::Outputs::kLast && i == count - 1;
      if (last || input.outputs == StepInput::Outputs::kAll) {
        rows.output_rows.push_back(static_cast<int32_t>(first_row + i));
      }
    }
    rows.runs.push_back({first_row, count, target.length, nullptr});
    for (const int32_t block : target.blocks) {
      kv_.append_pages(kv_.block(block), false, rows.pages);
    }
    rows.far.blocks.push_back(kv_.far_blocks(target));
    for (int64_t b = 0; b < rows.far.blocks.back(); ++b) {
      kv_.append_pages(kv_.block(target.blocks[static_cast<size_t>(b)]), true, rows.far.pages);
    }
    kv_.grown(target, target.length + count);
  }
  const int32_t* pages = rows.pages.data();
  for (SequenceRun& run : rows.runs) {
    run.pages = pages;
    pages += kv_.blocks_for(run.first_position + run.tokens) * plan_.kv.layers;
  }
}

// Where KV overflows, any step must find room for what it writes: its new blocks, and the last one
// of every sequence, which never leaves.
void Engine::Impl::check_pools() const {
  if (!kv_.overflows()) return;
  const int64_t least = kv_.blocks_for(plan_.limits.step_tokens) + 2 * plan_.limits.sequences;
  if (kv_.near().slots() >= least) return;
  fail(ErrorKind::kInvalid, "[plan] schedule.pages.accelerator: holds ", kv_.near().slots(),
       " blocks of KV pages, steps of ", plan_.limits.step_tokens, " tokens of ",
       plan_.limits.sequences, " sequences need ", least,
       "; give the KV cache more memory there or lower step_tokens");
}

// Steps of others end first; one without an owner is alone.
void Engine::Impl::make_way(StepOwner* owner) {
  if (in_flight() == 0 || (owner != nullptr && owner_ == owner)) return;
  if (owner_ == nullptr) {
    fail(ErrorKind::kInvalid, "[engine] ", in_flight(), " submitted steps were not collected");
  }
  owner_->collect_steps();
}

std::span<const float> Engine::Impl::step(std::span<const StepInput> inputs) {
  make_way(nullptr);
  submit(inputs, nullptr);
  return collect();
}

void Engine::Impl::submit(std::span<const StepInput> inputs, StepOwner* owner) {
  if (owner_ != owner) make_way(owner);
  if (in_flight() >= steps_ahead()) {
    fail(ErrorKind::kCapacity, "[engine] ", in_flight(),
         " steps are on their way, the most at once; collect one first");
  }
  check(inputs);
  make_room(inputs);
  gather(inputs, pipeline_.rows());
  owner_ = owner;
  pipeline_.submit();
}

std::span<const float> Engine::Impl::collect() {
  if (in_flight() == 0) fail(ErrorKind::kInvalid, "[engine] no step was submitted");
  return pipeline_.collect();
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
bool Engine::can_open(int64_t capacity, int64_t shared) const {
  return impl_->can_open(capacity, shared);
}
SequenceId Engine::open(int64_t capacity) {
  return impl_->open(capacity);
}
SequenceId Engine::fork(SequenceId source, int64_t length, int64_t capacity) {
  return impl_->fork(source, length, capacity);
}
void Engine::save(SequenceId sequence, std::span<const int32_t> tokens, const std::string& path,
                  const std::string& metadata, const Progress& progress) {
  impl_->save(sequence, tokens, path, metadata, progress);
}
LoadedSequence Engine::load(const std::string& path, int64_t capacity, const Progress& progress) {
  return impl_->load(path, capacity, progress);
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
  impl_->resize(sequence, length, impl_->capacity(sequence));
}
void Engine::resize(SequenceId sequence, int64_t length, int64_t capacity) {
  impl_->resize(sequence, length, capacity);
}
bool Engine::can_resize(SequenceId sequence, int64_t length, int64_t capacity) const {
  return impl_->can_resize(sequence, length, capacity);
}
int64_t Engine::steps_ahead() const {
  return impl_->steps_ahead();
}
int64_t Engine::in_flight() const {
  return impl_->in_flight();
}
void Engine::submit(std::span<const StepInput> inputs, StepOwner* owner) {
  impl_->submit(inputs, owner);
}
std::span<const float> Engine::collect() {
  return impl_->collect();
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
