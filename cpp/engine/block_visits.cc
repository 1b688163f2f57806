#include "engine/block_visits.h"

#include <algorithm>

#include "base/arena.h"
#include "cpu/stage.h"
#include "plan/stages.h"

namespace helm {
namespace {

// Of the KV of a layer that visits, which has an attention.
int64_t kv_layer(const UnitSpec& attention) {
  for (const Op& op : attention.ops) {
    if (const auto* found = std::get_if<AttentionOp>(&op)) return found->layer;
  }
  return 0;
}

}  // namespace

BlockVisits::BlockVisits(const Plan& plan, const Weights& weights, const StageSpec& bound,
                         std::span<std::byte> kv, Account& accelerator)
    : plan_(plan),
      weights_(weights),
      host_kv_(kv),
      blocks_(plan.units.size()),
      visiting_layers_(static_cast<size_t>(plan.kv.layers), false),
      device_(accelerator.device()),
      pinned_(device_),
      copies_(accelerator.device().create_stream()) {
  const std::vector<bool> visits = visits_of(plan);
  std::vector<std::span<const std::byte>> visiting;
  int64_t largest = 0;
  size_t turn = 0;
  size_t* next = &first_;
  for (size_t u = 0; u < plan.units.size(); u = layer_end(plan, u)) {
    if (!visits[u]) continue;
    std::vector<bool> only(plan.units.size(), false);
    std::fill(only.begin() + static_cast<ptrdiff_t>(u),
              only.begin() + static_cast<ptrdiff_t>(layer_end(plan, u)), true);
    Block& block = blocks_[u];
    block.tensors = placed_in_order(plan, tensors_of(plan, only), kCpu);
    block.layer = kv_layer(plan.units[u]);
    block.buffer = turn;
    turn ^= 1;
    *next = u;
    next = &block.next;
    visiting_layers_[static_cast<size_t>(block.layer)] = true;
    for (const auto& [index, offset] : block.tensors) {
      const Weight& held = weights.on(kCpu)[static_cast<size_t>(index)];
      visiting.emplace_back(cpu::host_pointer<const std::byte>(held.address),
                            static_cast<size_t>(bytes_of(index)));
    }
    const auto& [last, offset] = block.tensors.back();
    largest = std::max(largest, offset + bytes_of(last));
  }
  pinned_.lock(std::move(visiting), false);
  pinned_.lock({host_kv_}, true);
  largest = align_up(largest, kDeviceAlignment);
  weights_memory_ = DeviceMemory(accelerator, 2 * largest, "weights that visit");
  kv_memory_ = DeviceMemory(accelerator, plan.schedule.stream_pages * plan.kv.page_bytes(),
                            "KV pages that visit");
  for (size_t i = 0; i < buffers_.size(); ++i) {
    buffers_[i] = {weights_memory_.address() + static_cast<int64_t>(i) * largest,
                   device_.create_event(), device_.create_event()};
  }
  for (size_t u = 0; u < blocks_.size(); ++u) {
    Block& block = blocks_[u];
    if (block.tensors.empty()) continue;
    StageSpec spec = bound;
    spec.units = std::span(plan.units).subspan(u, layer_end(plan, u) - u);
    spec.kv = kv_memory_.address();
    spec.weights.assign(plan.tensors.size(), Weight{});
    for (const auto& [index, offset] : block.tensors) {
      const auto i = static_cast<size_t>(index);
      spec.weights[i] = {buffers_[block.buffer].address + offset, weights.on(kCpu)[i].format};
    }
    block.stage = device_.compile(spec);
  }
}

bool BlockVisits::holds(const StepView& step) const {
  int64_t pages = 0;
  for (const SequenceRun& run : step.runs) pages += blocks_for(run.first_position + run.tokens);
  return pages <= plan_.schedule.stream_pages;
}

StepView BlockVisits::begin(const StepView& step) {
  pages_.clear();
  table_.clear();
  runs_.assign(step.runs.begin(), step.runs.end());
  int32_t next = 0;
  for (const SequenceRun& run : step.runs) {
    const int64_t blocks = blocks_for(run.first_position + run.tokens);
    pages_.push_back({run.pages, next, blocks_for(run.first_position),
                      run.first_position / plan_.kv.page_tokens, blocks});
    for (int64_t block = 0; block < blocks; ++block, ++next) {
      for (int64_t layer = 0; layer < plan_.kv.layers; ++layer) {
        const bool visits = visiting_layers_[static_cast<size_t>(layer)];
        table_.push_back(visits ? next : run.pages[block * plan_.kv.layers + layer]);
      }
    }
  }
  const int32_t* table = table_.data();
  for (SequenceRun& run : runs_) {
    run.pages = table;
    table += blocks_for(run.first_position + run.tokens) * plan_.kv.layers;
  }
  load(first_);
  return {step.token_ids, step.positions, step.output_rows, runs_, runs_, next_step_number()};
}

void BlockVisits::load(size_t unit) {
  Block& block = blocks_[unit];
  Buffer& buffer = buffers_[block.buffer];
  copies_->wait(*buffer.read);
  for (const auto& [index, offset] : block.tensors) {
    const auto i = static_cast<size_t>(index);
    copies_->upload(buffer.address + offset, cpu::host_pointer(weights_.on(kCpu)[i].address),
                    bytes_of(index));
  }
  copies_->record(*buffer.loaded);
}

void BlockVisits::run(size_t unit, const StepView& view, Stream& stream) {
  Block& block = blocks_[unit];
  Buffer& buffer = buffers_[block.buffer];
  const int64_t page_bytes = plan_.kv.page_bytes();
  const auto host = [&](const Pages& pages, int64_t b) {
    return host_kv_.data() + pages.host[b * plan_.kv.layers + block.layer] * page_bytes;
  };
  const auto here = [&](const Pages& pages, int64_t b) {
    return kv_memory_.address() + (pages.first + b) * page_bytes;
  };
  for (const Pages& pages : pages_) {
    for (int64_t b = 0; b < pages.existing; ++b) {
      stream.upload(here(pages, b), host(pages, b), page_bytes);
    }
  }
  stream.wait(*buffer.loaded);
  block.stage->run(stream, view);
  stream.record(*buffer.read);
  // Before the pages come back: copies to memory that is not page-locked may hold up the host.
  if (block.next != 0) load(block.next);
  for (const Pages& pages : pages_) {
    for (int64_t b = pages.begin; b < pages.end; ++b) {
      stream.download(host(pages, b), here(pages, b), page_bytes);
    }
  }
}

}  // namespace helm
