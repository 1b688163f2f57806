#include "program/stages.h"

#include <algorithm>

#include "base/arena.h"
#include "cpu/key_bias.h"
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
  queries_ = StagingMemory(host, device, row_bytes * query_width, "queries that cross");
  partials_ =
      StagingMemory(host, device, row_bytes * plan.values.back().width, "attention that crosses");
  scratch = align_up(scratch, kCacheLine);
  workspace_ = StagingMemory(host, device, std::max<int64_t>(1, scratch + biases), "the workspace");
  next_bias_ = workspace_.data() + scratch;
}

BoundProgram Stages::bind(Program program) {
  BoundProgram made;
  made.visiting.assign(plan_.kv.layers.size(), false);
  const auto most_bytes = [&](ValueIndex value) {
    return value_bytes(plan_, value, plan_.limits.step_tokens, plan_.limits.step_outputs);
  };
  const bool logits_cross = plan_.units.back().device != kCpu;
  Places places(logits_cross ? most_bytes(plan_.logits) : 0);
  bool rested = false;
  size_t last = 0;  // of a device's main queue
  for (const Task& task : program.tasks) {
    const size_t index = made.tasks.size();
    Bound bound;
    bound.task = task;
    if (task.runs()) bind_run(bound, made);
    if (task.verb == Verb::kCopy) bind_copy(bound);
    if (crosses(task)) {
      const int64_t bytes = most_bytes(task.value);
      const bool out = logits_cross && task.value == plan_.logits;
      bound.offset = out ? 0 : places.take(task, index, bytes);
      made.staging_bytes = std::max(made.staging_bytes, bound.offset + bytes);
    }
    if (!task.after.empty()) {  // others are done before the last, or a ring knows
      Bound& from = made.tasks[static_cast<size_t>(task.after.back())];
      bound.waits = waits(task, from.task);
      from.records = from.records || bound.waits != Bound::kHost;
    }
    const bool waits = task.device == kCpu && bound.waits == Bound::kMain;
    if (task.device == kCpu) places.run(task.after, waits);
    if (queue_of(task) == Bound::kMain) last = index;
    rested = rested || waits;
    made.late = made.late || (rested && task.device != kCpu);
    made.tasks.push_back(std::move(bound));
  }
  // A step ends when all is done that it has enqueued.
  made.tasks[last].records = queue_of(made.tasks[last].task) == Bound::kMain;
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
  for (size_t i = 0; i <= static_cast<size_t>(task.each); ++i) bound.stages[i] = stage(task, i);
  if (!visits(task)) return;
  bound.buffer = &visits_->buffer(task.begin);
  for (size_t u = task.begin; u < task.end; ++u) {
    const AttentionOp* op = attention_of(plan_.units[u]);
    if (op == nullptr || plan_.units[u].device == task.device) continue;
    made.visiting[static_cast<size_t>(op->layer)] = true;
  }
}

void Stages::bind_copy(Bound& bound) {
  const Task& task = bound.task;
  bound.width = plan_.values[static_cast<size_t>(task.value)].width;
  if (crosses(task)) return;
  const bool down = task.lane == Task::Lane::kDown;
  bound.host = down ? queries_.data() : partials_.data();
  if (!down) bound.width = attention_of(plan_.units[task.begin])->partial_width();
}

Stage* Stages::stage(const Task& task, size_t buffer) {
  std::unique_ptr<Stage>& stage = stages_[{task.verb, task.device, task.begin, task.end, buffer}];
  if (stage == nullptr) {
    Device& device = accounts_[static_cast<size_t>(task.device)]->device();
    stage = device.compile(spec(task, buffer));
    DiskRing* disk = task.device == kCpu ? weights_.disk() : nullptr;
    if (disk != nullptr && disk->layout().of(task.begin) != nullptr) {
      stage = std::make_unique<ReadingStage>(std::move(stage), *disk, task.begin);
    }
  }
  return stage.get();
}

StageSpec Stages::spec(const Task& task, size_t buffer) {
  if (task.verb == Verb::kFar && task.device == kCpu) return spec_of_far_on_cpu(task);
  StageSpec spec = buffers_[static_cast<size_t>(task.device)].spec(plan_);
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
StageSpec Stages::spec_of_far_on_cpu(const Task& task) {
  parts_.push_back(plan_.units[task.begin]);
  parts_.back().ops = ops(task);
  const AttentionOp& op = *attention_of(plan_.units[task.begin]);
  StageSpec spec;
  spec.plan = &plan_;
  spec.units = {&parts_.back(), 1};
  spec.weights.assign(plan_.tensors.size(), Weight{});
  spec.values.assign(plan_.values.size(), DeviceAddress::kNull);
  spec.values[static_cast<size_t>(op.in)] = cpu::device_address(queries_.data());
  spec.values[static_cast<size_t>(far_value())] = cpu::device_address(partials_.data());
  spec.kv.assign(plan_.kv.layers.size(), cpu::device_address(paging_->far_slot(0)));
  spec.workspace = cpu::device_address(workspace_.data());
  if (const auto bias = cpu::key_bias(plan_, op.layer)) {
    const auto tensor = static_cast<size_t>(bias->tensor);
    const DeviceIndex holder = plan_.units[task.begin].device;
    const auto stream = accounts_[static_cast<size_t>(holder)]->device().create_stream();
    stream->download(next_bias_, weights_.on(holder)[tensor].address,
                     cpu::tensor_bytes(plan_, *bias));
    stream->synchronize();
    spec.weights[tensor].address = cpu::device_address(next_bias_);
    next_bias_ += bias_bytes(plan_, *bias);
  }
  return spec;
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
