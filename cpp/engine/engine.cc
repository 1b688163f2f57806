// The engine: loads what a plan places, accounts for it, and offers it as the public calls.
#include "helm/engine.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <variant>

#include "base/check.h"
#include "device/formats.h"
#include "device/registry.h"
#include "engine/engine_impl.h"
#include "plan/reader.h"

namespace helm {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Weight bytes that a step of one token reads: of experts those of the ones chosen.
int64_t decode_bytes(const Plan& plan) {
  int64_t bytes = 0;
  for (const UnitSpec& unit : plan.units) {
    for (const Op& op : unit.ops) {
      const auto* mixture = std::get_if<ExpertsOp>(&op);
      each_tensor(op, [&](TensorIndex index, Reads reads) {
        const TensorSpec& tensor = plan.tensors[static_cast<size_t>(index)];
        if (reads != Reads::kWhole || !tensor.is_matrix()) return;
        const int64_t all = read_bytes(plan.format(unit, index), tensor.rows(), tensor.cols());
        bytes += mixture == nullptr ? all : all / mixture->experts * mixture->chosen;
      });
    }
  }
  return bytes;
}

// Those that were asked for, one for each thread.
std::vector<int> checked_cpus(const std::vector<int>& cpus, int threads) {
  if (!cpus.empty() && cpus.size() != static_cast<size_t>(threads)) {
    fail(ErrorKind::kInvalid, "[engine] ", cpus.size(), " CPUs were named for ", threads,
         " threads; name one for each thread, or none");
  }
  for (const int cpu : cpus) {
    if (cpu < 0) fail(ErrorKind::kInvalid, "[engine] CPU ", cpu, " was named; expected 0 or more");
  }
  return cpus;
}

int thread_count(const Plan& plan, const EngineOptions& options) {
  if (options.threads < 0 || options.threads > kMostThreads) {
    fail(ErrorKind::kInvalid, "[engine] ", options.threads,
         " threads were asked for; expected 1 to ", kMostThreads, ", or 0 for the plan's");
  }
  return options.threads > 0 ? options.threads : plan.threads;
}

const EngineOptions::Pace& checked_pace(const EngineOptions::Pace& pace) {
  for (const double rate : {pace.cpu_bytes_per_s, pace.node_bytes_per_s, pace.disk_bytes_per_s}) {
    if (rate >= 0 && std::isfinite(rate)) continue;
    fail(ErrorKind::kInvalid, "[engine] a pace of ", rate,
         " bytes per second was asked for; expected more than 0, or 0 for none");
  }
  return pace;
}

// Of a byte on a node that the plan names, in bytes of the CPU's own pace.
double node_cost(const EngineOptions::Pace& pace) {
  return pace.node_bytes_per_s > 0 ? pace.cpu_bytes_per_s / pace.node_bytes_per_s : 1;
}

// The plan, if its devices have kernels for all of its formats.
const Plan& checked_formats(const Plan& plan, const Device& cpu, const Device* accelerator) {
  check_formats(plan, cpu, kCpu);
  if (accelerator != nullptr) check_formats(plan, *accelerator, Plan::kFirstAccelerator);
  return plan;
}

bool uses_accelerator(const Plan& plan) {
  return plan.devices.size() > 1 && plan.uses(Plan::kFirstAccelerator);
}

// What Plan() makes has no units. Of accelerators the engine drives one.
Plan made(Plan plan) {
  if (plan.units.empty()) {
    fail(ErrorKind::kInvalid,
         "[engine] the plan is empty; read one with Plan::from_file() or Plan::from_json()");
  }
  if (plan.devices.size() > 2) {
    fail(ErrorKind::kInvalid, "[engine] the plan has a second accelerator, \"",
         plan.devices[2].name, "\" beside \"", plan.devices[1].name,
         "\"; this runtime executes plans with one; make the plan anew for that");
  }
  return plan;
}

}  // namespace

Engine::Impl::Impl(Plan plan, const EngineOptions& options)
    : plan_(made(std::move(plan))),
      kernels_(cpu::select_kernels()),
      threads_(thread_count(plan_, options),
               checked_cpus(options.cpus, thread_count(plan_, options))),
      team_size_(threads_.size(), options.threads == 0),
      start_(Clock::now()),
      cpu_(kernels_, threads_, &op_times_, cpu::select_integer_kernels(),
           checked_pace(options.pace).cpu_bytes_per_s, node_cost(options.pace)),
      cpu_account_(cpu_, plan_.memory_bytes[kCpu]),
      accelerator_(uses_accelerator(plan_)
                       ? open_accelerator(options.device, options.cublas_directories)
                       : nullptr),
      accelerator_account_(accelerator_
                               ? std::make_unique<Account>(
                                     *accelerator_, plan_.memory_bytes[Plan::kFirstAccelerator])
                               : nullptr),
      weights_(checked_formats(plan_, cpu_, accelerator_.get()), options, kernels_, threads_,
               cpu_account_, accelerator_account_.get()),
      kv_(plan_, entry_devices(plan_)),
      executor_(plan_, weights_, kv_, accounts()),
      load_s_(seconds_since(start_)) {
  check_pools();
}

DeviceUse Engine::Impl::use_of(DeviceIndex device) const {
  const bool on_cpu = device == kCpu;
  const Account& account = on_cpu ? cpu_account_ : *accelerator_account_;
  const DeviceInfo info = account.device().describe();
  DeviceUse use = executor_.use_of(device);
  use.device = plan_.devices[static_cast<size_t>(device)].name;
  use.kind = info.kind;
  use.name = info.name;
  use.weights_bytes = on_cpu ? weights_.cpu_bytes() : weights_.accelerator_bytes();
  use.peak_bytes = account.peak_bytes();
  if (account.limit_bytes() != Plan::kUnlimited) use.budget_bytes = account.limit_bytes();
  return use;
}

EngineStats Engine::Impl::stats() const {
  EngineStats stats;
  stats.devices.push_back(use_of(kCpu));
  if (accelerator_) stats.devices.push_back(use_of(Plan::kFirstAccelerator));
  for (const DeviceUse& use : stats.devices) {
    stats.weights_bytes += use.weights_bytes;
    stats.kv_bytes += use.kv_bytes;
    stats.activations_bytes += use.activations_bytes;
    stats.workspace_bytes += use.workspace_bytes;
  }
  stats.decode_bytes = decode_bytes(plan_);
  stats.kv_token_bytes =
      plan_.kv.model_layers() * (plan_.kv.kv_heads * plan_.kv.unit_bytes() / plan_.kv.page_tokens);
  executor_.count(stats);
  for (size_t i = 0; i < kOpKinds; ++i) {
    const auto kind = static_cast<OpKind>(i);
    const cpu::OpTimes::Kind& times = op_times_.of(kind);
    if (times.runs == 0) continue;
    const double seconds = std::chrono::duration<double>(times.time).count();
    stats.cpu_ops.push_back({op_kind_name(kind), times.runs, seconds});
  }
  stats.experts = experts_use();
  stats.threads = threads_.size();
  stats.active_threads = team_size_.size();
  stats.cpus = threads_.cpus();
  stats.isa = kernels_.name;
  stats.copied_bytes = weights_.copied_bytes();
  stats.node_bytes = weights_.node_bytes();
  stats.huge_pages = weights_.huge_pages();
  stats.huge_page_bytes = weights_.huge_page_bytes();
  stats.load_s = load_s_;
  return stats;
}

std::vector<std::span<const std::byte>> Engine::Impl::lazy_memory() const {
  std::vector<std::span<const std::byte>> found = cpu_.lazy_memory();
  if (accelerator_) {
    const auto more = accelerator_->lazy_memory();
    found.insert(found.end(), more.begin(), more.end());
  }
  return found;
}

Engine::Engine(Plan plan, EngineOptions options)
    : impl_(std::make_unique<Impl>(std::move(plan), options)) {}
Engine::~Engine() {
  // In a forked child: its threads, and the device's, are not there to be stopped.
  if (!impl_->here()) static_cast<void>(impl_.release());
}

Engine::Impl& Engine::used() const {
  impl_->check_process();
  return *impl_;
}

void Engine::check_process() const {
  impl_->check_process();
}
bool Engine::forked() const {
  return !impl_->here();
}

const Plan& Engine::plan() const {
  return impl_->plan();
}
EngineStats Engine::stats() const {
  return used().stats();
}
std::vector<std::span<const std::byte>> Engine::lazy_memory() const {
  return impl_->lazy_memory();
}
void Engine::count_op_times(bool on) {
  used().count_op_times(on);
}
bool Engine::can_open(int64_t capacity, int64_t spare, const HeldPrefix& prefix,
                      std::span<const HeldBlock> without) const {
  return used().can_open(capacity, spare, prefix, without);
}
SequenceId Engine::open(int64_t capacity, const HeldPrefix& prefix) {
  return used().open(capacity, prefix);
}
SequenceId Engine::fork(SequenceId source, int64_t length, int64_t capacity) {
  return used().fork(source, length, capacity);
}
std::vector<HeldBlock> Engine::blocks(SequenceId sequence, int64_t length) const {
  return used().blocks(sequence, length);
}
std::vector<HeldBlock> Engine::detach(SequenceId sequence, int64_t length) {
  return used().detach(sequence, length);
}
void Engine::release(std::span<const HeldBlock> held) {
  used().release(held);
}
int64_t Engine::usable(std::span<const HeldBlock> blocks, int64_t length) const {
  return used().usable(blocks, length);
}
void Engine::save(SequenceId sequence, std::span<const int32_t> tokens, const std::string& path,
                  const std::string& metadata, const Progress& progress) {
  used().save(used().blocks_to_save(sequence, std::ssize(tokens)), tokens, path, metadata,
              progress);
}
void Engine::save(std::span<const HeldBlock> blocks, std::span<const int32_t> tokens,
                  const std::string& path, const std::string& metadata, const Progress& progress) {
  used().save(blocks, tokens, path, metadata, progress);
}
LoadedSequence Engine::load(const std::string& path, int64_t capacity, const Progress& progress) {
  return used().load(path, capacity, progress);
}
void Engine::close(SequenceId sequence) {
  used().close(sequence);
}
int64_t Engine::capacity(SequenceId sequence) const {
  return used().capacity(sequence);
}
int64_t Engine::length(SequenceId sequence) const {
  return used().length(sequence);
}
void Engine::truncate(SequenceId sequence, int64_t length) {
  used().resize(sequence, length, used().capacity(sequence));
}
void Engine::resize(SequenceId sequence, int64_t length, int64_t capacity) {
  used().resize(sequence, length, capacity);
}
bool Engine::can_resize(SequenceId sequence, int64_t length, int64_t capacity) const {
  return used().can_resize(sequence, length, capacity);
}
bool Engine::grow(SequenceId sequence, int64_t capacity) {
  return used().grow(sequence, capacity);
}
bool Engine::continues(SequenceId sequence, int64_t length) const {
  return used().continues(sequence, length);
}
int64_t Engine::steps_ahead() const {
  return used().steps_ahead();
}
ExpertsUse Engine::experts_use() const {
  return used().experts_use();
}

FarUse Engine::far_use() const {
  return used().far_use();
}
int64_t Engine::move(SequenceId sequence, KvSide side) {
  return used().move(sequence, side);
}
bool Engine::can_move(SequenceId sequence, KvSide side) const {
  return used().can_move(sequence, side);
}
KvSide Engine::side(SequenceId sequence) const {
  return used().side(sequence);
}
bool Engine::moves() const {
  return used().moves();
}
int64_t Engine::near_room() const {
  return used().near_room();
}
int64_t Engine::near_most() const {
  return used().near_most();
}
int64_t Engine::far_room() const {
  return used().far_room();
}
int64_t Engine::far_wanted(SequenceId sequence, int64_t tokens) const {
  return used().far_wanted(sequence, tokens);
}
int64_t Engine::near_blocks(SequenceId sequence) const {
  return used().near_blocks(sequence);
}
int64_t Engine::near_blocks(std::span<const HeldBlock> held) const {
  return std::ssize(used().near_ones(held));
}
void Engine::leave(std::span<const HeldBlock> held) {
  used().leave(held);
}
bool Engine::can_leave(std::span<const HeldBlock> held) const {
  return used().can_leave(held);
}
int64_t Engine::near_wanted(SequenceId sequence, int64_t tokens) const {
  return used().near_wanted(sequence, tokens);
}
int64_t Engine::in_flight() const {
  return used().in_flight();
}
bool Engine::splits() const {
  return used().splits();
}
void Engine::submit(std::span<const StepInput> inputs, size_t second) {
  used().submit(inputs, second);
}
std::span<const float> Engine::collect() {
  return used().collect();
}
void Engine::share(int64_t count, const std::function<void(int64_t, int)>& work) {
  used().share(count, work);
}
std::span<const float> Engine::step(std::span<const StepInput> inputs) {
  return used().step(inputs);
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
