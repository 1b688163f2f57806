#include "engine/kv_overflow.h"

#include <algorithm>

#include "base/arena.h"
#include "base/check.h"
#include "cpu/key_bias.h"
#include "cpu/stage.h"
#include "plan/stages.h"

namespace helm {
namespace {

int64_t partial_width(const AttentionOp& op) {
  return op.heads * (op.head_dim + 2);
}

}  // namespace

Plan KvOverflow::with_partials(const Plan& plan) {
  Plan extended = plan;
  int64_t width = 1;
  for (const UnitSpec& unit : plan.units) {
    for (const Op& op : unit.ops) {
      if (const auto* attention = std::get_if<AttentionOp>(&op)) {
        width = std::max(width, partial_width(*attention));
      }
    }
  }
  extended.values.push_back({"attention over near pages", width, false});
  extended.values.push_back({"attention over far pages", width, false});
  return extended;
}

KvOverflow::KvOverflow(const Plan& plan, KvCache& kv, const StageSpec& bound, Account& cpu,
                       Account& accelerator)
    : plan_(plan),
      kv_(kv),
      device_(accelerator.device()),
      near_(bound.kv),
      slot_bytes_(kv.near_layers() * plan.kv.page_bytes()),
      evict_above_(
          static_cast<int64_t>(plan.schedule.watermark * static_cast<double>(kv.near().slots()))),
      far_(cpu, device_, kv.far_pages() * plan.kv.page_bytes(), "the KV cache in host memory"),
      page_memory_(accelerator, 2 * plan.kv.page_bytes(), "KV pages that visit"),
      written_(device_.create_event()),
      recalled_(device_.create_event()),
      query_ready_(device_.create_event()),
      query_here_(device_.create_event()),
      values_(bound.values),
      cpu_stream_(cpu.device().create_stream()),
      copies_(device_.create_stream()) {
  for (size_t i = 0; i < visitors_.size(); ++i) {
    visitors_[i] = {page_memory_.address() + static_cast<int64_t>(i) * plan.kv.page_bytes(),
                    device_.create_event(), device_.create_event()};
  }
  visitor_table_.assign(static_cast<size_t>(plan_.kv.layers), 0);
  specs_.reserve(6 * plan_.units.size());  // stages keep spans of it
  compile(bound);
  compile_on_cpu(cpu, bound);
}

void KvOverflow::compile(const StageSpec& bound) {
  const auto near_value = static_cast<ValueIndex>(plan_.values.size() - 2);
  const ValueIndex far_value = near_value + 1;
  const std::vector<bool> resident = resident_units(plan_);
  units_.resize(plan_.units.size());
  StageSpec spec = bound;
  const auto stage = [&](Device& device, const std::string& name, std::vector<Op> ops) {
    specs_.push_back({name, "", std::move(ops)});
    spec.units = std::span(specs_).last(1);
    return device.compile(spec);
  };
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!resident[u]) continue;
    const UnitSpec& unit = plan_.units[u];
    Unit& out = units_[u];
    const auto at = std::find_if(unit.ops.begin(), unit.ops.end(), [](const Op& op) {
      return std::holds_alternative<AttentionOp>(op);
    });
    std::vector<Op> before(unit.ops.begin(), at);
    if (at == unit.ops.end()) {
      out.before = stage(device_, unit.name, std::move(before));
      continue;
    }
    const AttentionOp& op = out.attention = std::get<AttentionOp>(*at);
    const auto attend = [&](ValueIndex partial) {
      return AttendOp{op.in,       op.q_offset, partial,  op.layer, op.heads,
                      op.kv_heads, op.head_dim, op.scale, op.window};
    };
    before.emplace_back(AppendOp{op.in, op.k_offset, op.v_offset, op.layer});
    before.emplace_back(ResetOp{near_value, op.heads, op.head_dim});
    before.emplace_back(ResetOp{far_value, op.heads, op.head_dim});
    std::vector<Op> after{MergeOp{far_value, near_value, op.out, op.heads, op.head_dim}};
    after.insert(after.end(), at + 1, unit.ops.end());
    out.before = stage(device_, unit.name + ", up to attention", std::move(before));
    out.near = stage(device_, unit.name + ", near pages", {attend(near_value)});
    out.after = stage(device_, unit.name + ", from attention on", std::move(after));
    for (size_t i = 0; i < visitors_.size(); ++i) {
      spec.kv = visitors_[i].page;
      out.visiting[i] = stage(device_, unit.name + ", visiting page", {attend(far_value)});
    }
    spec = bound;
  }
}

// The CPU's stages, which read queries and write partials where they cross.
void KvOverflow::compile_on_cpu(Account& account, const StageSpec& bound) {
  Device& cpu = account.device();
  int64_t query_width = 1;
  for (const Unit& unit : units_) {
    if (unit.near == nullptr) continue;
    const auto in = static_cast<size_t>(unit.attention.in);
    query_width = std::max(query_width, plan_.values[in].width);
  }
  const int64_t rows = plan_.limits.sequences;
  const int64_t float_bytes = sizeof(float);
  query_ = StagingMemory(account, device_, rows * query_width * float_bytes, "queries that cross");
  partial_ = StagingMemory(account, device_, rows * plan_.values.back().width * float_bytes,
                           "attention that crosses");
  const auto far_value = static_cast<ValueIndex>(plan_.values.size() - 1);
  int64_t scratch = 0, biases = 0;
  const auto bias_bytes = [&](const cpu::KeyBias& bias) {
    return align_up(cpu::tensor_bytes(plan_, bias), kCacheLine);
  };
  std::vector<std::pair<size_t, size_t>> on_cpu;  // unit, spec
  for (size_t u = 0; u < units_.size(); ++u) {
    if (units_[u].near == nullptr) continue;
    const AttentionOp& op = units_[u].attention;
    specs_.push_back({plan_.units[u].name + ", far pages",
                      "",
                      {ResetOp{far_value, op.heads, op.head_dim},
                       AttendOp{op.in, op.q_offset, far_value, op.layer, op.heads, op.kv_heads,
                                op.head_dim, op.scale, op.window}}});
    on_cpu.emplace_back(u, specs_.size() - 1);
    if (const auto bias = cpu::key_bias(plan_, op.layer)) biases += bias_bytes(*bias);
    scratch = std::max(scratch, cpu.workspace_bytes(plan_, std::span(specs_).last(1)));
  }
  scratch = align_up(scratch, kCacheLine);
  cpu_workspace_ =
      StagingMemory(account, device_, std::max<int64_t>(1, scratch + biases), "the workspace");
  std::byte* next_bias = cpu_workspace_.data() + scratch;
  for (const auto& [u, s] : on_cpu) {
    StageSpec host;
    host.plan = &plan_;
    host.units = std::span(specs_).subspan(s, 1);
    host.weights.assign(plan_.tensors.size(), Weight{});
    if (const auto bias = cpu::key_bias(plan_, units_[u].attention.layer)) {
      const auto tensor = static_cast<size_t>(bias->tensor);
      copies_->download(next_bias, bound.weights[tensor].address, cpu::tensor_bytes(plan_, *bias));
      copies_->synchronize();
      host.weights[tensor].address = cpu::device_address(next_bias);
      next_bias += bias_bytes(*bias);
    }
    host.values.assign(plan_.values.size(), DeviceAddress::kNull);
    host.values[static_cast<size_t>(units_[u].attention.in)] = cpu::device_address(query_.data());
    host.values[static_cast<size_t>(far_value)] = cpu::device_address(partial_.data());
    host.kv = cpu::device_address(far_.data());
    host.workspace = cpu::device_address(cpu_workspace_.data());
    units_[u].on_cpu = cpu.compile(host);
  }
}

void KvOverflow::make_room(int64_t blocks, Stream& stream) {
  stream.record(*written_);
  copies_->wait(*written_);
  const SlotPool& near = kv_.near();
  const auto leaving = [&] { return static_cast<int64_t>(leaving_.size()); };
  while (near.used() - leaving() + blocks > evict_above_ && kv_.far().free() > 0 &&
         kv_.oldest_near()) {
    evict_one();
  }
  while (near.free() < blocks && leaving() > 0) reclaim_one();
  if (near.free() < blocks) {
    fail(ErrorKind::kCapacity, "[engine] a step takes ", blocks, " new KV blocks, ", near.free(),
         " of ", near.slots(), " are free on the accelerator and none can be evicted; give the KV ",
         "cache more memory there or close a sequence");
  }
}

void KvOverflow::evict_one() {
  const int32_t block = *kv_.oldest_near();
  const int32_t slot = kv_.evict(block);
  ++evicted_blocks_;
  if (spare_.empty()) spare_.push_back(device_.create_event());
  copies_->download(far_slot(kv_.block(block).far), near_ + slot * slot_bytes_, slot_bytes_);
  copies_->record(*spare_.back());
  leaving_.push_back({slot, std::move(spare_.back())});
  spare_.pop_back();
}

void KvOverflow::reclaim_one() {
  Leaving& oldest = leaving_.front();
  oldest.copied->synchronize();
  kv_.release_near(oldest.slot);
  spare_.push_back(std::move(oldest.copied));
  leaving_.pop_front();
}

void KvOverflow::recall(int32_t block, Stream& stream) {
  const bool full = kv_.near().free() == 0 && leaving_.empty() && kv_.far().free() == 0;
  if (full && kv_.oldest_near()) return exchange(block, stream);
  make_room(1, stream);
  const int32_t slot = kv_.recall(block);
  copies_->upload(near_ + kv_.block(block).near * slot_bytes_, far_slot(slot), slot_bytes_);
  copies_->record(*recalled_);
  stream.wait(*recalled_);
  recalled_->synchronize();  // before the slot holds another block
  kv_.release_far(slot);
}

void KvOverflow::exchange(int32_t block, Stream& stream) {
  stream.record(*written_);
  copies_->wait(*written_);
  copies_->synchronize();  // pages that visit have been read, too
  std::byte* far = far_slot(kv_.block(block).far);
  const std::vector<std::byte> content(far, far + slot_bytes_);
  const DeviceAddress near = near_ + kv_.exchange(block) * slot_bytes_;
  ++evicted_blocks_;
  copies_->download(far, near, slot_bytes_);
  copies_->upload(near, content.data(), slot_bytes_);
  copies_->synchronize();
}

void KvOverflow::run(size_t begin, size_t end, const StepView& step, const FarRuns& far,
                     Stream& stream) {
  const size_t sequences = step.runs.size();
  const bool decode = step.tokens() == static_cast<int64_t>(sequences);
  const bool on_cpu = decode && plan_.schedule.overflow == Schedule::Overflow::kCpu;
  runs_.assign(step.runs.begin(), step.runs.end());
  far_runs_ = runs_;
  const int32_t* pages = far.pages.data();
  for (size_t r = 0; r < sequences; ++r) {
    runs_[r].first_block = far.blocks[r];
    runs_[r].pages += far.blocks[r] * plan_.kv.layers;
    far_runs_[r].end_block = far.blocks[r];
    far_runs_[r].pages = pages;
    pages += far.blocks[r] * plan_.kv.layers;
    if (on_cpu) continue;
    for (int64_t block = 0; block < far.blocks[r]; ++block) {
      SequenceRun visit = step.runs[r];
      visit.pages = visitor_table_.data();
      visit.first_block = block;
      visit.end_block = block + 1;
      runs_.push_back(visit);
    }
  }
  const StepView whole{step.token_ids, step.positions, step.output_rows,
                       runs_,          runs_,          next_step_number()};
  const StepView near = whole.piece(0, sequences);
  const StepView far_view{step.token_ids, step.positions, step.output_rows, far_runs_};
  for (size_t u = begin; u < end; ++u) {
    const Unit& unit = units_[u];
    unit.before->run(stream, near);
    if (unit.near == nullptr) continue;
    if (on_cpu) {
      attend_on_cpu(unit, near, far_view, stream);
    } else {
      attend_visiting(unit, whole, far, stream);
      unit.near->run(stream, near);
    }
    unit.after->run(stream, near);
  }
}

void KvOverflow::attend_on_cpu(const Unit& unit, const StepView& near, const StepView& far,
                               Stream& stream) {
  const AttentionOp& op = unit.attention;
  const int64_t float_bytes = sizeof(float);
  const int64_t width = plan_.values[static_cast<size_t>(op.in)].width;
  stream.record(*query_ready_);
  copies_->wait(*query_ready_);
  copies_->download(query_.data(), values_[static_cast<size_t>(op.in)],
                    near.tokens() * width * float_bytes);
  copies_->record(*query_here_);
  unit.near->run(stream, near);
  query_here_->synchronize();  // evicted pages have arrived then, too
  unit.on_cpu->run(*cpu_stream_, far);
  ++cpu_attentions_;
  stream.upload(values_.back(), partial_.data(), near.tokens() * partial_width(op) * float_bytes);
}

void KvOverflow::attend_visiting(const Unit& unit, const StepView& whole, const FarRuns& far,
                                 Stream& stream) {
  const AttentionOp& op = unit.attention;
  const int64_t page_bytes = plan_.kv.page_bytes();
  const size_t sequences = far.blocks.size();
  const int32_t* pages = far.pages.data();
  size_t visit = sequences;  // among the runs
  for (size_t r = 0; r < sequences; ++r) {
    const int64_t first = whole.all_runs[r].first_position - op.window + 1;
    const int64_t seen =
        op.window > 0 ? std::max<int64_t>(0, first) / plan_.kv.page_tokens : 0;  // from this block
    for (int64_t block = 0; block < far.blocks[r]; ++block, ++visit) {
      if (block < seen) continue;
      Visitor& visitor = visitors_[turn_];
      ++page_visits_;
      const int64_t page = pages[block * plan_.kv.layers + op.layer];
      copies_->wait(*visitor.read);
      copies_->upload(visitor.page, far_.data() + page * page_bytes, page_bytes);
      copies_->record(*visitor.loaded);
      stream.wait(*visitor.loaded);
      unit.visiting[turn_]->run(stream, whole.piece(visit, 1));
      stream.record(*visitor.read);
      turn_ ^= 1;
    }
    pages += far.blocks[r] * plan_.kv.layers;
  }
}

}  // namespace helm
