#include "program/stages.h"

#include <algorithm>

#include "base/arena.h"
#include "cpu/stage.h"
#include "program/lower.h"

namespace helm {
namespace {

using Verb = Task::Verb;

// With a step, through its flight's memory.
bool crosses(const Task& task) {
  return task.verb == Verb::kCopy && task.begin == task.end;
}

Bound::Queue queue_of(const Task& task) {
  return task.device == kCpu ? Bound::kHost : task.aside ? Bound::kAside : Bound::kMain;
}

// Whose event a task waits for, where it is `after` another.
Bound::Queue waits(const Task& task, const Task& after) {
  const bool ring = task.verb == Verb::kVisit || after.verb == Verb::kRead ||
                    after.verb == Verb::kVisit || after.verb == Verb::kPage ||
                    queue_of(task) == queue_of(after);
  return ring ? Bound::kHost : queue_of(after);
}

// Where values lie in a flight's memory on their way. What came down keeps its place until the CPU
// has read it. What goes up keeps it until the CPU has waited for a task behind it; but what comes
// down may lie there at once, since it comes in the same queue behind what goes up.
class Places {
 public:
  explicit Places(int64_t begin) : begin_(begin) {}

  int64_t take(const Task& copy, size_t index, int64_t bytes) {
    const bool up = copy.lane == Task::Lane::kUp;
    int64_t offset = begin_;
    const auto taken = [&](const Place& one) {
      return (up || !one.up) && offset < one.end && one.begin < offset + bytes;
    };
    for (auto one = taken_.begin(); one != taken_.end();) {
      one = std::ranges::find_if(taken_, taken);
      if (one != taken_.end()) offset = one->end;
    }
    taken_.push_back({offset, offset + bytes, static_cast<int32_t>(index), up});
    return offset;
  }
  // Of the CPU, with what it is after.
  void run(const std::vector<int32_t>& after, bool waited) {
    std::erase_if(taken_, [&](const Place& one) {
      return one.up ? waited && one.task < after.back()
                    : std::ranges::find(after, one.task) != after.end();
    });
  }

 private:
  struct Place {
    int64_t begin, end;
    int32_t task;
    bool up;
  };
  int64_t begin_;
  std::vector<Place> taken_;
};

// Of one unit, with weights that come from disk.
class ReadingStage final : public Stage {
 public:
  ReadingStage(std::unique_ptr<Stage> stage, DiskRing& disk, size_t unit)
      : stage_(std::move(stage)), disk_(disk), unit_(unit) {}

  void run(Stream& stream, const StepView& step) override {
    disk_.acquire(unit_);
    stage_->run(stream, step);
    disk_.release(unit_);
  }

 private:
  std::unique_ptr<Stage> stage_;
  DiskRing& disk_;
  size_t unit_;
};

int64_t bias_bytes(const Plan& plan, const cpu::KeyBias& bias) {
  return align_up(cpu::tensor_bytes(plan, bias), kCacheLine);
}

}  // namespace

Stages::Stages(const Plan& plan, const Weights& weights, std::span<const DeviceBuffers> buffers,
               std::span<Account* const> accounts, Visits* visits, const Paging* paging)
    : plan_(plan),
      weights_(weights),
      buffers_(buffers),
      accounts_(accounts),
      visits_(visits),
      paging_(paging),
      lacking_(lacking_units(plan)) {
  if (paging == nullptr) return;
  Account &host = *accounts[kCpu], &account = *accounts[Plan::kFirstAccelerator];
  far_pages_ = Ring(account, 2, plan.kv.kv_heads * plan.kv.unit_bytes(), "KV pages that visit");
  int64_t query_width = 1, scratch = 0, biases = 0;
  for (size_t u = 0; u < plan.units.size(); ++u) {
    const AttentionOp* op = attention_of(plan.units[u]);
    if (op == nullptr || plan.units[u].device == kCpu) continue;
    query_width = std::max(query_width, plan.values[static_cast<size_t>(op->in)].width);
    UnitSpec far;
    far.ops = ops({Verb::kFar, Task::Lane::kDevice, kCpu, u, u + 1});
    scratch = std::max(scratch, host.device().workspace_bytes(plan, {&far, 1}));
    if (const auto bias = cpu::key_bias(plan, op->layer)) biases += bias_bytes(plan, *bias);
  }
  const int64_t row_bytes = plan.limits.sequences * int64_t{sizeof(float)};
  Device& device = account.device();
  const int64_t partial_width = plan.values.back().width;
  for (size_t batch = 0; batch < (split_rows(plan) > 0 ? 2 : 1); ++batch) {
    queries_[batch] = StagingMemory(host, device, row_bytes * query_width, "queries that cross");
    partials_[batch] =
        StagingMemory(host, device, row_bytes * partial_width, "attention that crosses");
  }
  scratch = align_up(scratch, kCacheLine);
  workspace_ = StagingMemory(host, device, std::max<int64_t>(1, scratch + biases), "the workspace");
  next_bias_ = workspace_.data() + scratch;
}

// Gives what crosses its places behind `begin`; returns where they end.
int64_t Stages::place_copies(std::span<Bound> tasks, int64_t begin, const Limits& limits) const {
  const bool logits_cross = plan_.units.back().device != kCpu;
  Places places(begin);
  int64_t end = begin;
  for (size_t i = 0; i < tasks.size(); ++i) {
    Bound& bound = tasks[i];
    const Task& task = bound.task;
    if (crosses(task) && !(logits_cross && task.value == plan_.logits)) {
      const int64_t bytes = value_bytes(plan_, task.value, limits.step_tokens, limits.step_outputs);
      bound.offset = places.take(task, i, bytes);
      end = std::max(end, bound.offset + bytes);
    }
    if (task.device == kCpu) places.run(task.after, bound.waits == Bound::kMain);
  }
  return end;
}

int64_t Stages::crossing_bytes(const BoundProgram& program, int64_t tokens) const {
  std::vector<Bound> tasks = program.tasks;
  Limits limits = plan_.limits;
  limits.step_tokens = limits.step_outputs = tokens;
  return place_copies(tasks, 0, limits);
}

BoundProgram Stages::bind(Program program, SubBatch batch) {
  BoundProgram made;
  made.batch = batch;
  made.visiting.assign(plan_.kv.layers.size(), false);
  bool rested = false;
  size_t last = 0;  // of a device's main queue
  for (const Task& task : program.tasks) {
    Bound bound;
    bound.task = task;
    if (task.runs()) bind_run(bound, made);
    if (task.verb == Verb::kCopy) bind_copy(bound, batch);
    if (!task.after.empty()) {  // others are done before the last, or a ring knows
      Bound& from = made.tasks[static_cast<size_t>(task.after.back())];
      bound.waits = waits(task, from.task);
      from.records = from.records || bound.waits != Bound::kHost;
    }
    const bool waits = task.device == kCpu && bound.waits == Bound::kMain;
    if (queue_of(task) == Bound::kMain) last = made.tasks.size();
    rested = rested || waits;
    made.late = made.late || (rested && task.device != kCpu);
    made.tasks.push_back(std::move(bound));
  }
  // A step ends when all is done that it has enqueued.
  made.tasks[last].records = queue_of(made.tasks[last].task) == Bound::kMain;
  Limits limits = plan_.limits;
  if (batch == kSecondBatch) limits.step_tokens = limits.step_outputs = split_rows(plan_);
  const bool logits_cross = batch == kFirstBatch && plan_.units.back().device != kCpu;
  const int64_t begin =
      logits_cross ? value_bytes(plan_, plan_.logits, limits.step_tokens, limits.step_outputs) : 0;
  made.staging_bytes = place_copies(made.tasks, begin, limits);
  made.brings = program.brings();
  made.program = std::move(program);
  return made;
}

// Whether weights of the task's units come to its device.
bool Stages::visits(const Task& task) const {
  const std::span units = std::span(plan_.units).subspan(task.begin, task.end - task.begin);
  return task.verb == Verb::kRun &&
         (lacking_[task.begin] || std::ranges::any_of(units, [&](const UnitSpec& unit) {
            return unit.device != task.device;
          }));
}

void Stages::bind_run(Bound& bound, BoundProgram& made) {
  const Task& task = bound.task;
  for (size_t i = 0; i <= static_cast<size_t>(task.each); ++i) {
    bound.stages[i] = stage(task, i, made.batch);
  }
  if (!visits(task)) return;
  bound.buffer = &visits_->buffer(task.begin);
  for (size_t u = task.begin; u < task.end; ++u) {
    const AttentionOp* op = attention_of(plan_.units[u]);
    if (op == nullptr || plan_.units[u].device == task.device) continue;
    made.visiting[static_cast<size_t>(op->layer)] = true;
  }
}

void Stages::bind_copy(Bound& bound, SubBatch batch) {
  const Task& task = bound.task;
  bound.width = plan_.values[static_cast<size_t>(task.value)].width;
  if (crosses(task)) return;
  const bool down = task.lane == Task::Lane::kDown;
  bound.host = (down ? queries_ : partials_)[batch].data();
  if (!down) bound.width = attention_of(plan_.units[task.begin])->partial_width();
}

Stage* Stages::stage(const Task& task, size_t buffer, SubBatch batch) {
  if (task.device == kCpu && task.verb != Verb::kFar) batch = kFirstBatch;  // it has one set
  std::unique_ptr<Stage>& stage =
      stages_[{task.verb, task.device, task.begin, task.end, buffer, batch}];
  if (stage == nullptr) {
    Device& device = accounts_[static_cast<size_t>(task.device)]->device();
    stage = device.compile(spec(task, buffer, batch));
    DiskRing* disk = task.device == kCpu ? weights_.disk() : nullptr;
    if (disk != nullptr && disk->layout().of(task.begin) != nullptr) {
      stage = std::make_unique<ReadingStage>(std::move(stage), *disk, task.begin);
    }
  }
  return stage.get();
}

StageSpec Stages::spec(const Task& task, size_t buffer, SubBatch batch) {
  if (task.verb == Verb::kFar && task.device == kCpu) return spec_of_far_on_cpu(task, batch);
  StageSpec spec = buffers_[static_cast<size_t>(task.device)].spec(plan_, batch);
  spec.weights = weights_.on(task.device);
  spec.units = std::span(plan_.units).subspan(task.begin, task.end - task.begin);
  if (visits(task)) visits_->bind(task.begin, spec);
  if (task.verb == Verb::kRun) return spec;
  if (task.verb == Verb::kFar) spec.kv.assign(plan_.kv.layers.size(), far_pages_[buffer].address);
  parts_.push_back(spec.units[0]);
  parts_.back().ops = ops(task);
  spec.units = {&parts_.back(), 1};
  return spec;
}

// Reads queries and writes partial results where they cross; pages where they lie.
StageSpec Stages::spec_of_far_on_cpu(const Task& task, SubBatch batch) {
  parts_.push_back(plan_.units[task.begin]);
  parts_.back().ops = ops(task);
  const AttentionOp& op = *attention_of(plan_.units[task.begin]);
  StageSpec spec;
  spec.plan = &plan_;
  spec.units = {&parts_.back(), 1};
  spec.weights.assign(plan_.tensors.size(), Weight{});
  spec.values.assign(plan_.values.size(), DeviceAddress::kNull);
  spec.values[static_cast<size_t>(op.in)] = cpu::device_address(queries_[batch].data());
  spec.values[static_cast<size_t>(far_value())] = cpu::device_address(partials_[batch].data());
  spec.kv.assign(plan_.kv.layers.size(), cpu::device_address(paging_->far_slot(0)));
  spec.workspace = cpu::device_address(workspace_.data());
  if (const auto bias = cpu::key_bias(plan_, op.layer)) {
    spec.weights[static_cast<size_t>(bias->tensor)].address =
        cpu::device_address(bias_of(task, *bias));
  }
  return spec;
}

// A copy of the bias of the task's keys, which its device has.
std::byte* Stages::bias_of(const Task& task, const cpu::KeyBias& bias) {
  const auto [found, added] = biases_.try_emplace(bias.tensor, next_bias_);
  if (!added) return found->second;
  const DeviceIndex holder = plan_.units[task.begin].device;
  const auto stream = accounts_[static_cast<size_t>(holder)]->device().create_stream();
  stream->download(next_bias_, weights_.on(holder)[static_cast<size_t>(bias.tensor)].address,
                   cpu::tensor_bytes(plan_, bias));
  stream->synchronize();
  next_bias_ += bias_bytes(plan_, bias);
  return found->second;
}

// Of a part of a layer whose pages are spread.
std::vector<Op> Stages::ops(const Task& task) const {
  const std::vector<Op>& all = plan_.units[task.begin].ops;
  const AttentionOp& op = *attention_of(plan_.units[task.begin]);
  const auto at = std::ranges::find_if(
      all, [](const Op& one) { return std::holds_alternative<AttentionOp>(one); });
  const ValueIndex far = far_value(), near = far - 1;
  const auto attend = [&](ValueIndex partial) {
    return AttendOp{op.in,       op.q_offset, partial,  op.layer,  op.heads,
                    op.kv_heads, op.head_dim, op.scale, op.window, op.softcap};
  };
  std::vector<Op> made;
  switch (task.verb) {
    case Verb::kBefore:
      made.assign(all.begin(), at);
      made.emplace_back(AppendOp{op.in, op.k_offset, op.v_offset, op.layer});
      made.emplace_back(ResetOp{near, op.heads, op.head_dim});
      made.emplace_back(ResetOp{far, op.heads, op.head_dim});
      break;
    case Verb::kNear:
      made.emplace_back(attend(near));
      break;
    case Verb::kFar:
      if (task.device != kCpu) {  // pages that visit: before the near ones, in one sum
        made.emplace_back(attend(near));
        break;
      }
      made.emplace_back(AppendOp{op.in, op.k_offset, op.v_offset, op.layer});
      made.emplace_back(ResetOp{far, op.heads, op.head_dim});
      made.emplace_back(attend(far));
      break;
    default:
      made.emplace_back(MergeOp{far, near, op.out, op.heads, op.head_dim, op.sinks});
      made.insert(made.end(), at + 1, all.end());
      for (size_t u = task.begin + 1; u < task.end; ++u) {
        made.insert(made.end(), plan_.units[u].ops.begin(), plan_.units[u].ops.end());
      }
  }
  return made;
}

}  // namespace helm
