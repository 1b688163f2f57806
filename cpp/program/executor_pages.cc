// What an executor does with KV pages between steps: room for them, moves, copies, files.
#include <algorithm>
#include <cstring>

#include "cpu/kv_page.h"
#include "cpu/stage.h"
#include "program/executor.h"

namespace helm {

void Executor::make_room(int64_t blocks, int64_t far_blocks, std::span<const int32_t> recalled) {
  if (paging_ == nullptr) return;
  // Tasks that are not enqueued yet would look for pages that have left.
  if (in_flight_ > 0 && std::ranges::any_of(programs_, &BoundProgram::late)) finish();
  check_devices();
  for (const int32_t block : recalled) paging_->recall(block, far_blocks, main());
  paging_->make_room(blocks, far_blocks, main());
}

// Work while no step is on its way, whose failure is that of the device.
template <typename Work>
void Executor::guarded(const Work& work) try {
  finish();
  check_devices();
  work();
} catch (const std::exception& error) {
  if (failure_.empty()) failure_ = error.what();
  throw;
}

void Executor::free_near(int64_t slots) {
  guarded([&] { paging_->reclaim(slots); });
}

void Executor::move_blocks(std::span<const int32_t> blocks, bool far) {
  guarded([&] { far ? paging_->leave(blocks, main()) : paging_->come(blocks, main()); });
}

// Nothing is on its way that reads or writes pages.
void Executor::settle() {
  finish();
  check_devices();
  for (const auto& stream : streams_) stream->synchronize();
  if (pages_aside_ != nullptr) pages_aside_->synchronize();
}

// By entry.
std::vector<Executor::PagePlace> Executor::places_of(const KvBlock& block) const {
  std::vector<int32_t> pages;
  kv_.append_pages(block, false, pages);
  std::vector<PagePlace> places(pages.size());
  for (size_t entry = 0; entry < pages.size(); ++entry) {
    if (pages[entry] == KvBlock::kNone && block.far == KvBlock::kNone) continue;  // given up
    const int64_t offset = pages[entry] * plan_.kv.unit_bytes();
    if (!kv_.near_entry(entry)) {
      places[entry].host = cpu::host_pointer(buffers_[kCpu].kv()) + offset;
    } else if (block.far != KvBlock::kNone) {
      places[entry].host = paging_->far_slot(block.far) + kv_.slot_offset(entry);
    } else {
      places[entry].device = buffers_.back().kv() + offset;
    }
  }
  return places;
}

// Keys, then values, of each entry: move(place in its page, offset in a block of all heads, slabs).
template <typename Move>
void Executor::each_half(const KvBlock& block, const Move& move) {
  settle();
  const KvSpec& kv = plan_.kv;
  const std::vector<PagePlace> places = places_of(block);
  for (size_t entry = 0; entry < places.size(); ++entry) {
    if (!places[entry].exists()) continue;
    const KvLayer& heads = kv.layers[entry];
    for (const int64_t half : {0, 1}) {
      const int64_t slab = (2 * kv.layer_number(entry) + half) * kv.kv_heads + heads.kv_head;
      move(places[entry].at(half * kv.page_bytes(entry) / 2), slab * kv.slab_bytes(),
           heads.kv_heads);
    }
  }
  main().synchronize();
}

void Executor::read_block(const KvBlock& block, int64_t positions, std::byte* to) {
  each_half(block, [&](PagePlace from, int64_t offset, int64_t slabs) {
    if (from.host != nullptr) {
      cpu::copy_positions(plan_.kv, slabs, positions, from.host, to + offset);
    } else {
      main().download(to + offset, from.device, slabs * plan_.kv.slab_bytes());
    }
  });
}

void Executor::write_block(const KvBlock& block, int64_t positions, const std::byte* from) {
  each_half(block, [&](PagePlace to, int64_t offset, int64_t slabs) {
    if (to.host != nullptr) {
      cpu::copy_positions(plan_.kv, slabs, positions, from + offset, to.host);
    } else {
      main().upload(to.device, from + offset, slabs * plan_.kv.slab_bytes());
    }
  });
}

void Executor::copy_block(const KvBlock& from, const KvBlock& to, int64_t positions) try {
  settle();
  const std::vector<PagePlace> sources = places_of(from), targets = places_of(to);
  // The longest page: copies of a stream follow one another, and none may see it move.
  std::vector<std::byte> crossing(static_cast<size_t>(plan_.kv.kv_heads * plan_.kv.unit_bytes()));
  for (size_t entry = 0; entry < sources.size(); ++entry) {
    const int64_t bytes = plan_.kv.page_bytes(entry);
    const PagePlace& source = sources[entry];
    const PagePlace& target = targets[entry];
    if (!source.exists()) continue;
    if (target.host != nullptr && source.host == nullptr) {
      main().download(target.host, source.device, bytes);
    } else if (target.host != nullptr) {
      const int64_t slabs = 2 * plan_.kv.layers[entry].kv_heads;
      cpu::copy_positions(plan_.kv, slabs, positions, source.host, target.host);
    } else if (source.host != nullptr) {
      main().upload(target.device, source.host, bytes);
    } else {
      main().download(crossing.data(), source.device, bytes);
      main().upload(target.device, crossing.data(), bytes);
    }
  }
  main().synchronize();
} catch (const std::exception& error) {
  if (failure_.empty()) failure_ = error.what();
  throw;
}

}  // namespace helm
